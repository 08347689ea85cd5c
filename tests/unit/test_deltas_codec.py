"""Damage at every place, other bases, new and gone tensors, streams: what a receiver relies on."""

from collections.abc import Iterator
from io import BytesIO

import numpy as np
import pytest

from tidemill.core.errors import DeltaError
from tidemill.deltas.codec import apply, apply_stream, diff, diff_stream
from tidemill.deltas.words import Tensor


def bf16(values: np.ndarray) -> Tensor:
    return Tensor.of("BF16", (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))


def small() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rng = np.random.default_rng(3)
    old = rng.standard_normal((6, 10)) * 0.1
    new = {
        "matrix": bf16(old * np.where(rng.random((6, 10)) < 0.3, 1.02, 1.0)),
        "ids": Tensor.of("I32", np.arange(4, dtype=np.uint32)),
        "fresh": bf16(np.ones(3)),
    }
    return {"matrix": bf16(old), "ids": Tensor.of("I32", np.arange(4, dtype=np.uint32) + 7)}, new


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name].words, other[name].words) for name in one
    )


@pytest.mark.parametrize("compile_loops", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("mode", ["differential", "overwrite"])
def test_every_flipped_bit_is_refused(mode: str, compile_loops: bool) -> None:
    old, new = small()
    delta = diff(old, new, mode=mode)  # type: ignore[arg-type]
    assert same(apply(delta, old, compile_loops=compile_loops), new)
    for index in range(len(delta)):
        for bit in range(8):
            bad = bytearray(delta)
            bad[index] ^= 1 << bit
            with pytest.raises(DeltaError):
                apply(bytes(bad), old, compile_loops=compile_loops)


def test_every_cut_and_every_addition_is_refused() -> None:
    old, new = small()
    delta = diff(old, new)
    for keep in range(len(delta)):
        with pytest.raises(DeltaError):
            apply(delta[:keep], old)
    with pytest.raises(DeltaError, match="follows its end"):
        apply(delta + b"\0", old)


def test_damage_behind_right_checksums_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's own checks, and the hash of the result, hold where a checksum would have let damage through."""
    from tidemill.deltas import codec

    monkeypatch.setattr(codec, "_check", lambda body, salt, number, index: b"same")
    rng = np.random.default_rng(5)
    old = bf16(rng.standard_normal((40, 50)) * np.exp2(rng.integers(-30, 0, (40, 50))))
    words = old.words.copy()
    words[rng.random(words.shape) < 0.1] += 1
    base, result = {"w": old}, {"w": Tensor.of("BF16", words)}
    delta = diff(base, result)
    for compile_loops in (False, True):
        for index in range(30, len(delta)):
            bad = bytearray(delta)
            bad[index] ^= int(rng.integers(1, 256))
            try:
                assert same(apply(bytes(bad), base, compile_loops=compile_loops), result)
            except DeltaError:
                continue


def test_parts_cannot_change_places() -> None:
    base = {"a": bf16(np.zeros(4)), "b": bf16(np.zeros(4))}
    result = {"a": bf16(np.ones(4)), "b": bf16(np.full(4, 2.0))}
    delta = diff(base, result, mode="overwrite")
    first, second = (diff({name: base[name]}, {name: result[name]}, mode="overwrite") for name in "ab")
    assert same(apply(delta, base), result)
    size = len(delta) - 14
    part = (size - delta.index(b"\x28\xb5\x2f\xfd", 20)) // 2
    swapped = delta[: size - part] + delta[size - 2 * part : size - part] + delta[size:]
    with pytest.raises(DeltaError):
        apply(swapped, base)
    assert first != second


def test_an_applied_delta_is_not_applied_again() -> None:
    old, new = small()
    delta = diff(old, new)
    with pytest.raises(DeltaError, match="base"):
        apply(delta, {**new, "matrix": new["matrix"]})
    other = {**old, "matrix": bf16(np.zeros((6, 11)))}
    with pytest.raises(DeltaError, match=r"BF16 \[6, 11\].*not the base"):
        apply(delta, other)
    with pytest.raises(DeltaError, match="no tensor ids"):
        apply(delta, {"matrix": old["matrix"]})


def test_tensors_come_and_go_and_change_their_shape() -> None:
    old = {"gone": bf16(np.ones(2)), "wider": bf16(np.ones(2)), "kept": bf16(np.ones(2))}
    new = {"kept": bf16(np.ones(2)), "wider": bf16(np.ones(3)), "fresh": bf16(np.ones((0, 2)))}
    for threads in (1, 3):
        assert same(apply(diff(old, new, threads=threads), old, threads=threads), new)
    assert same(apply(diff({}, {}), {}), {})


def test_other_versions_and_other_files_are_named() -> None:
    delta = bytearray(diff({}, {}))
    delta[7] = 9
    with pytest.raises(DeltaError, match="format version 9"):
        apply(bytes(delta), {})
    with pytest.raises(DeltaError, match="no Tidemill delta"):
        apply(b"something else", {})
    with pytest.raises(DeltaError, match="dtype 'F4'"):
        diff({}, {"w": Tensor("F4", np.zeros(2, np.uint8))})
    with pytest.raises(DeltaError, match="BF16 are int16"):
        Tensor.of("BF16", np.zeros(2, np.int16))
    with pytest.raises(ValueError, match="threads is 0"):
        diff({}, {}, threads=0)


class Lazy(dict[str, Tensor]):
    """Counts how many tensors are looked at before the first result comes."""

    asked: list[str]

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        return super().__getitem__(name)

    def get(self, name: str, default: object = None) -> Tensor:  # type: ignore[override]
        self.asked.append(name)
        return super().get(name)  # type: ignore[return-value]


def test_tensors_stream_one_by_one() -> None:
    old = {f"t{number}": bf16(np.full(5, float(number))) for number in range(4)}
    new = {name: bf16(np.full(5, 3.0)) for name in old}
    sink = BytesIO()
    parts = list(diff_stream(old, new, sink))
    assert [part.name for part in parts] == sorted(old)
    assert sum(part.num_bytes for part in parts) < len(sink.getvalue())
    base = Lazy(old)
    base.asked = []
    results: Iterator[tuple[str, Tensor]] = apply_stream(BytesIO(sink.getvalue()), base)
    assert next(results)[0] == "t0"
    assert base.asked == ["t0"]
    # A cut-off delta still yields what came before the cut, and then says so.
    cut = apply_stream(BytesIO(sink.getvalue()[:-20]), old)
    assert same(dict([next(cut), next(cut), next(cut)]), {name: new[name] for name in ("t0", "t1", "t2")})
    with pytest.raises(DeltaError):
        next(cut)
