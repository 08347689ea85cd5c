"""Deltas of format version 1, as they were first written, can be read for ever.

`python tests/golden/test_delta_format.py` writes the files anew: only together with a new format version.
"""

from pathlib import Path

import numpy as np
import pytest

from tidemill.deltas.codec import Mode, apply, diff
from tidemill.deltas.words import Tensor

MODES: tuple[Mode, ...] = ("differential", "overwrite")


def golden(mode: Mode) -> Path:
    return Path(__file__).parent / f"delta_v1_{mode}.bin"


def tensors() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Integer arithmetic alone, so that they are the same everywhere: every coding occurs."""
    place = np.arange(6000, dtype=np.uint32)
    noise = (place * np.uint32(2654435761)) >> np.uint32(13)
    old = ((noise % 5000) + 0x3A00 + 0x8000 * (noise & 1)).astype(np.uint16).reshape(60, 100)
    moved = (noise % 23 == 0).reshape(60, 100)
    far = np.where(noise.reshape(60, 100) % 7 == 0, 300, 1).astype(np.uint16)
    new = np.where(moved, old + far, old).astype(np.uint16)
    return (
        {
            "sparse": Tensor.of("BF16", old),
            "same": Tensor.of("F8_E4M3", np.arange(16, dtype=np.uint8)),
            "dense": Tensor.of("F32", noise.astype(np.uint32)),
            "gone": Tensor.of("U8", np.zeros(3, np.uint8)),
        },
        {
            "sparse": Tensor.of("BF16", new),
            "same": Tensor.of("F8_E4M3", np.arange(16, dtype=np.uint8)),
            "dense": Tensor.of("F32", (noise + place % 5).astype(np.uint32)),
            "whole": Tensor.of("I64", np.arange(6, dtype=np.uint64).reshape(2, 3)),
        },
    )


@pytest.mark.parametrize("compile_loops", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("mode", MODES)
def test_old_deltas_are_read(mode: Mode, compile_loops: bool) -> None:
    old, new = tensors()
    result = apply(golden(mode).read_bytes(), old, compile_loops=compile_loops)
    assert {n: (t.dtype, t.words.tolist()) for n, t in result.items()} == {
        n: (t.dtype, t.words.tolist()) for n, t in new.items()
    }


@pytest.mark.parametrize("mode", MODES)
def test_deltas_have_not_grown(mode: Mode) -> None:
    old, new = tensors()
    # zstd may write other bytes in another release, of about the same number.
    assert len(diff(old, new, mode=mode)) <= 1.01 * golden(mode).stat().st_size


if __name__ == "__main__":
    for each in MODES:
        golden(each).write_bytes(diff(*tensors(), mode=each))
