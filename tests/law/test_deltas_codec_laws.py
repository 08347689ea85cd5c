"""`apply(diff(a, b), a)` is `b`, bit for bit: every dtype, any pattern, both modes, compiled and plain alike."""

from io import BytesIO
from itertools import product
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.errors import DeltaError
from tidemill.deltas.codec import apply, diff, diff_stream
from tidemill.deltas.kernels import kernels
from tidemill.deltas.words import KINDS, Tensor, kind_of, ordered, unordered

Mode = Literal["differential", "overwrite"]
MODES: tuple[Mode, ...] = ("differential", "overwrite")
SPECIAL = {  # ±0, the least subnormals, infinities, quiet and signalling NaNs with payloads, the last finite ones
    8: [0, 0x80, 1, 0x81, 0x7E, 0x7F, 0xFE, 0xFF, 0x78, 0x7C],
    16: [0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0x7F81, 0xFFFF, 0x7C00, 0xFC00, 0x7BFF, 0x7FFF],
    32: [0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF],
    64: [0, 1 << 63, 1, 0x7FF0000000000000, 0x7FF8000000000001, (1 << 64) - 1, (1 << 63) - 1],
}


@st.composite
def pairs(draw: st.DrawFn, dtype: str | None = None) -> tuple[Tensor, Tensor]:
    """A tensor and a later one: from nothing moved to everything moved, small steps and arbitrary ones."""
    dtype = dtype or draw(st.sampled_from(sorted(KINDS)))
    kind = kind_of(dtype)
    shape = tuple(draw(st.lists(st.integers(0, 12), min_size=0, max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        spread = np.exp2(rng.integers(-40, 3, shape)) * rng.standard_normal(shape)
        old = np.asarray(rng.integers(0, 1 << kind.bits, shape, dtype=np.uint64).astype(kind.word))
        if dtype == "BF16":
            old = np.asarray((spread.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
        elif dtype == "F32":
            old = np.asarray(spread.astype(np.float32)).view(np.uint32)
    else:
        old = np.asarray(rng.choice(np.array(SPECIAL[kind.bits], np.uint64), shape).astype(kind.word))
    moved = rng.random(shape) < draw(st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]))
    far = rng.integers(0, 1 << kind.bits, shape, dtype=np.uint64).astype(kind.word)
    step = rng.integers(-3, 4, shape).astype(kind.word)
    near = unordered((ordered(old, kind) + step).astype(kind.word), kind)
    new = np.where(moved, far if draw(st.booleans()) else near, old).astype(kind.word)
    return Tensor.of(dtype, old), Tensor.of(dtype, new)


def bits(tensors: dict[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (t.dtype, t.shape, t.words.tobytes()) for name, t in tensors.items()}


@settings(deadline=None)
@given(pairs(), pairs(), st.sampled_from(MODES), st.sampled_from([1, 7, 1 << 22]))
def test_the_round_trip_is_exact(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], mode: Mode, piece: int
) -> None:
    old, new = {"a": first[0], "b": second[0]}, {"a": first[1], "b": second[1]}
    written = []
    for compile_loops in (False, True):
        sink = BytesIO()
        for _ in diff_stream(old, new, sink, mode=mode, piece=piece, compile_loops=compile_loops):
            pass
        written.append(sink.getvalue())
    assert written[0] == written[1]  # numba and numpy write the same bytes
    for compile_loops, threads in product((False, True), (1, 2)):
        assert bits(apply(written[0], old, threads=threads, compile_loops=compile_loops)) == bits(new)
    if mode == "overwrite":
        half = {"a": first[1], "b": second[0]}  # as a crash in the middle may leave it
        assert bits(apply(written[0], half)) == bits(apply(written[0], new)) == bits(new)


@settings(deadline=None)
@given(pairs("BF16"), st.data())
def test_a_delta_over_another_base_is_refused(pair: tuple[Tensor, Tensor], data: st.DataObject) -> None:
    old, new = pair
    delta = diff({"w": old}, {"w": new})
    other = old.words.copy()
    if other.size:
        other.reshape(-1)[data.draw(st.integers(0, other.size - 1))] ^= data.draw(st.integers(1, 0xFFFF))
        try:
            result = apply(delta, {"w": Tensor.of("BF16", other)})
        except DeltaError as error:
            assert "base" in str(error)
        else:  # a dense coding holds the new words themselves: then any base is a right one
            assert result["w"].words.tobytes() == new.words.tobytes()


@pytest.mark.parametrize("compile_loops", [False, True], ids=["plain", "compiled"])
def test_a_million_weights_with_sparse_moves(compile_loops: bool) -> None:
    rng = np.random.default_rng(0)
    old = (rng.standard_normal((500, 2000)).astype(np.float32) * 0.02).view(np.uint32) >> 16
    old_words = old.astype(np.uint16)
    moved = rng.random(old_words.shape) < 0.01
    new_words = np.where(moved, old_words + rng.choice([1, -1, 2], old_words.shape), old_words).astype(np.uint16)
    base, result = {"w": Tensor.of("BF16", old_words)}, {"w": Tensor.of("BF16", new_words)}
    delta = diff(base, result)
    assert bits(apply(delta, base, compile_loops=compile_loops)) == bits(result)
    # A weight moves with probability 0.01, by one of three distances: 0.081 + 0.01 · 1.585 bits of entropy.
    assert len(delta) < 1.06 * (0.0808 + 0.01585) / 8 * old_words.size


def test_words_keep_their_order_and_no_two_share_a_place() -> None:
    kind = KINDS["BF16"]
    words = np.arange(1 << 16).astype(np.uint16)
    places = ordered(words, kind)
    assert np.array_equal(unordered(places, kind), words)
    values = (words.astype(np.uint32) << 16).view(np.float32)
    finite = words[np.isfinite(values)]
    by_place = values[finite[np.argsort(ordered(finite, kind))]]
    assert np.all(np.diff(by_place) >= 0)


def test_compiled_loops_are_there_in_development() -> None:
    assert kernels(True) is not kernels(False)
