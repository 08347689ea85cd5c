"""Records survive the wire; bfloat16 rounding agrees with torch's, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tidemill.core.records import Array, Layer, Tree, TreeFile, decode, digest, encode
from tidemill.core.seams import bfloat16_bits

DTYPES = ["float32", "int32", "uint16", "bool"]


@given(st.sampled_from(DTYPES).flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))))
def test_array_returns_every_bit(values: np.ndarray) -> None:
    array = decode(encode(Array.of(values, str(values.dtype))), Array)
    assert array.numpy().tobytes() == values.tobytes()
    assert array.numpy().shape == values.shape


@given(hnp.arrays(np.uint32, 64))
def test_bfloat16_is_torchs(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    ours = bfloat16_bits(values)
    numbers = ~np.isnan(values)
    assert (ours[numbers] == expected[numbers]).all()
    back = (ours.astype(np.uint32) << 16).view(np.float32)
    assert np.isnan(back[~numbers]).all()


@given(st.dictionaries(st.text(min_size=1), st.binary(), max_size=4))
def test_digest_is_of_the_content(files: dict[str, bytes]) -> None:
    tree = Tree(files=tuple(TreeFile(path=p, data=d) for p, d in sorted(files.items())))
    assert digest(decode(encode(tree), Tree)) == digest(tree)
    changed = Tree(files=(*tree.files, TreeFile(path="another", data=b"")))
    assert digest(changed) != digest(tree)


def test_decode_names_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"Layer.*python"):
        decode(b"\x81\xa6python\x01", Layer)
