"""The audit's own decoder against the codec: two readings of one format, written apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.deltas.codec import Mode, diff
from tidemill.deltas.words import Tensor
from tidemill.reports.audit.deltas import RawTensors, apply_delta


def raw(tensors: dict[str, Tensor]) -> RawTensors:
    return {name: (t.dtype, t.shape, t.words.tobytes()) for name, t in tensors.items()}


def pair(seed: int, shape: tuple[int, ...], share: float, reach: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 2, shape))
    old = np.asarray((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
    step = rng.integers(-reach, reach + 1, shape) + rng.integers(0, 2, shape[-1:]) * 2
    return Tensor.of("BF16", old), Tensor.of(
        "BF16", np.where(rng.random(shape) < share, old + step, old).astype(np.uint16)
    )


@settings(deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    st.sampled_from([1, 5, 300, 30000]),
    st.sampled_from([(40, 30), (200,), (2, 3, 5), (0, 4)]),
    st.sampled_from(["differential", "overwrite"]),
)
def test_both_decoders_agree(seed: int, share: float, reach: int, shape: tuple[int, ...], mode: Mode) -> None:
    old, new = pair(seed, shape, share, reach)
    base, result = {"w": old, "gone": old}, {"w": new, "fresh": new}
    assert apply_delta(diff(base, result, mode=mode), raw(base)) == raw(result)


def test_damage_and_other_bases_are_refused() -> None:
    old, new = pair(1, (30, 20), 0.05, 2)
    delta = diff({"w": old}, {"w": new})
    for index in range(len(delta)):
        bad = bytearray(delta)
        bad[index] ^= 0x10
        with pytest.raises(ValueError):
            apply_delta(bytes(bad), raw({"w": old}))
        with pytest.raises(ValueError):
            apply_delta(delta[:index], raw({"w": old}))
    with pytest.raises(ValueError):
        apply_delta(delta, raw({"w": new}))
    with pytest.raises(ValueError, match="does not fit its base"):
        apply_delta(delta, {})
