"""Weight deltas read a second time, from `docs/delta-format.md` alone: the audit trusts no decoder of the services.

Only bfloat16, which is all that a run's store holds. Made to be read, not to be fast.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from tidemill.reports.audit.forward import raw_tensors
from tidemill.reports.audit.readers import Run

WEIGHTS_FILE = "model.safetensors"
DELTA_FILE = "model.delta"
RawTensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name → (dtype, shape, bytes)."""

Bits = NDArray[np.bool_]
U16 = NDArray[np.uint16]
Ints = NDArray[Any]


class Versions:
    """The weights of a run's versions, the last one kept: ask in ascending order."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._last: tuple[int, RawTensors] | None = None

    def get(self, version: int) -> RawTensors:
        """Raises `ValueError` for a payload that is missing or damaged, and for a chain that has no beginning."""
        chain = [version]
        while self._last is None or self._last[0] != chain[-1]:
            manifest = self._run.manifests.get(chain[-1])
            if manifest is None:
                raise ValueError(f"version {chain[-1]}, on which version {version} rests, was never published")
            if manifest["kind"] == "full":
                break
            if not isinstance(manifest["parent"], int) or not 0 <= manifest["parent"] < chain[-1]:
                raise ValueError(f"version {chain[-1]} rests on version {manifest['parent']}")
            chain.append(manifest["parent"])
        for link in reversed(chain):
            if self._last is None or self._last[0] != link:
                self._last = (link, self._read(link))
        assert self._last is not None
        return self._last[1]

    def _read(self, version: int) -> RawTensors:
        manifest = self._run.manifests[version]
        name = WEIGHTS_FILE if manifest["kind"] == "full" else DELTA_FILE
        if name not in manifest["files"]:
            raise ValueError(f"version {version} is {manifest['kind']} and has no {name}")
        data = self._run.store_blobs.get(manifest["files"][name])
        if manifest["kind"] == "full":
            return raw_tensors(data)
        assert self._last is not None
        return apply_delta(data, self._last[1])


def apply_delta(data: bytes, base: RawTensors) -> RawTensors:
    """The tensors after a delta. Raises `ValueError` for a damaged delta, or one of another base."""
    try:
        return _apply(data, base)
    except (IndexError, zstandard.ZstdError, msgspec.DecodeError, OverflowError) as error:
        raise ValueError(f"a delta cannot be read: {error}") from error


def _apply(data: bytes, base: RawTensors) -> RawTensors:
    file = _Cursor(data)
    if file.take(8) != b"TMDELTA\x01":
        raise ValueError("a delta does not begin as format version 1 does")
    header = file.take(file.number())
    salt = xxhash.xxh3_64(data[: file.at]).intdigest()
    if int.from_bytes(file.take(8), "little") != salt:
        raise ValueError("the header of a delta is damaged")
    mode, piece, entries = msgspec.msgpack.decode(zstandard.decompress(header))
    del mode
    result: RawTensors = {}
    for t, (name, dtype, shape, fresh) in enumerate(entries):
        if dtype != "BF16":
            raise ValueError(f"tensor {name} is {dtype}: a run's store holds BF16")
        size = int(np.prod(shape, dtype=np.int64))
        if not fresh and (name not in base or base[name][:2] != ("BF16", tuple(shape))):
            raise ValueError(f"tensor {name} of a delta does not fit its base")
        old = None if fresh else np.frombuffer(base[name][2], np.uint16)
        parts = []
        for i in range(-(-size // piece)):
            body = file.take(file.number())
            seed = (salt + t * 0x9E3779B97F4A7C15 + i * 0xC2B2AE3D27D4EB4F) % 2**64
            if xxhash.xxh3_64(body, seed=seed).digest()[:4] != file.take(4):
                raise ValueError(f"part {i} of tensor {name} of a delta is damaged")
            start, end = i * piece, min((i + 1) * piece, size)
            columns = shape[-1] if len(shape) > 1 else 0
            parts.append(_piece(body, None if old is None else old[start:end], end - start, columns, start))
        words = np.concatenate(parts) if parts else np.zeros(0, np.uint16)
        if xxhash.xxh3_128(words.tobytes()).digest() != file.take(16):
            raise ValueError(f"tensor {name}: the result of a delta has another hash")
        result[name] = ("BF16", tuple(shape), words.tobytes())
    end = xxhash.xxh3_64(len(entries).to_bytes(8, "little"), seed=salt).digest()
    if file.take(6) + file.take(8) != b"TMDEND" + end or file.at != len(data):
        raise ValueError("a delta does not end as it should")
    return result


def _piece(body: bytes, old: U16 | None, size: int, columns: int, start: int) -> U16:
    coding, payload = body[0], body[1:]
    if coding == 3:
        return _bytes_of(payload, size)
    if old is None:
        raise ValueError("a delta changes a tensor that its base does not have")
    if coding == 0:
        return old
    if coding == 1:
        return _sparse(payload, old, columns, start)
    if coding == 2:
        zigzag = _bytes_of(payload, size).astype(np.int64)
        return _from_order(_to_order(old) + np.where(zigzag % 2, -(zigzag + 1) // 2, zigzag // 2))
    if coding == 4:
        file = _Cursor(payload)
        vector = _Vector.head(file)
        _runs(file, [vector])
        new = old.copy()
        new[vector.items] = _bytes_of(file.take(len(payload) - file.at), vector.items.size)
        return new
    raise ValueError(f"a delta has the unknown coding {coding}")


def _sparse(payload: bytes, old: U16, columns: int, start: int) -> U16:
    file = _Cursor(payload)
    with_columns = file.take(1)[0] == 1
    column_signs = file.bits(columns) if with_columns else np.zeros(0, np.bool_)
    first, last = file.take(2)
    by_position = np.concatenate([[0], np.cumsum(file.bits(last - first))])
    by_value = np.concatenate([[0], np.cumsum(file.bits(last - first))])
    positions = [_Vector.head(file) for _ in range(by_position[-1] + 1)]
    groups = []
    for _ in range(by_value[-1] + 1):
        num_planes = file.number()
        directions = [_Vector.head(file) for _ in range(1 + with_columns)]
        planes = [_Vector.head(file) for _ in range(num_planes)]
        groups.append((directions, planes, _Vector.head(file) if num_planes else None))
    every = positions + [v for d, p, u in groups for v in (*d, *p, *([u] if u else []))]
    _runs(file, every)

    kinds = (old >> 7) & 255
    moved = np.zeros(old.size, np.bool_)
    for number, vector in enumerate(positions):
        classes = np.flatnonzero(by_position == number) + first
        members = np.flatnonzero((kinds >= classes[0]) & (kinds <= classes[-1]))
        moved[members] = vector.bits(members.size)
    index = np.flatnonzero(moved)
    negative = old[index] >> 15 == 1
    second = column_signs[(index + start) % columns] != negative if with_columns else np.zeros(index.size, np.bool_)
    group_of = by_value[kinds[index].astype(np.int64) - first]
    shrinks, octave, upper = np.zeros(index.size, np.bool_), np.zeros(index.size, np.int64), np.zeros(index.size, int)
    for number, (directions, planes, mantissa) in enumerate(groups):
        members = np.flatnonzero(group_of == number)
        for side, vector in enumerate(directions):
            here = members[second[members] == bool(side)]
            shrinks[here] = vector.bits(here.size)
        for plane in planes:
            members = members[plane.bits(members.size)]
            octave[members] += 1
        if mantissa is not None:
            here = np.flatnonzero((group_of == number) & (octave == 1))
            upper[here] = mantissa.bits(here.size)
    rest = file.rest_bits()
    distance = np.empty(index.size, np.int64)
    at = 0
    for j in range(index.size):
        low = int(upper[j])
        if octave[j] >= 2:
            low = sum(int(bit) << b for b, bit in enumerate(rest[at : at + octave[j]]))
            at += int(octave[j])
        distance[j] = ((1 << int(octave[j])) + low) * (-1 if shrinks[j] != negative[j] else 1)
    new = old.copy()
    new[index] = _from_order(_to_order(old[index]) + distance)
    return new


def _to_order(words: U16) -> Ints:
    wide = words.astype(np.int64)
    return np.where(wide >= 0x8000, 0xFFFF - wide, wide + 0x8000)


def _from_order(places: Ints) -> U16:
    places = places % 0x10000
    return np.where(places >= 0x8000, places - 0x8000, 0xFFFF - places).astype(np.uint16)


def _bytes_of(payload: bytes, size: int) -> U16:
    planes = np.frombuffer(zstandard.decompress(payload), np.uint8)
    if planes.size != 2 * size:
        raise ValueError("a part of a delta has another size than its tensor")
    return planes[:size] + 256 * planes[size:].astype(np.uint16)


@dataclass
class _Vector:
    shift: int
    of_zeros: bool
    num: int
    items: Ints
    """Where the rarer bits lie."""

    @classmethod
    def head(cls, file: "_Cursor") -> "_Vector":
        first = file.take(1)[0]
        return cls(first % 32, first & 32 != 0, file.number(), np.zeros(0, np.int64))

    def bits(self, num: int) -> Bits:
        bits = np.full(num, self.of_zeros)
        bits[self.items] = not self.of_zeros
        return bits


def _runs(file: "_Cursor", vectors: list[_Vector]) -> None:
    ones = np.flatnonzero(np.unpackbits(np.frombuffer(file.take(file.number()), np.uint8), bitorder="little"))
    quotients = np.diff(ones, prepend=-1) - 1
    num_bits = sum(v.num * v.shift for v in vectors)
    low = np.unpackbits(np.frombuffer(file.take(-(-num_bits // 8)), np.uint8), bitorder="little").astype(np.int64)
    if quotients.size != sum(v.num for v in vectors):
        raise ValueError("a delta has another number of runs than it says")
    at = bit = 0
    for v in vectors:
        remainders = low[bit : bit + v.num * v.shift].reshape(v.num, v.shift) @ (1 << np.arange(v.shift))
        gaps = (quotients[at : at + v.num] << v.shift) + remainders
        v.items = np.cumsum(gaps + 1) - 1
        at += v.num
        bit += v.num * v.shift


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, num: int) -> bytes:
        if self.at + num > len(self.data):
            raise ValueError("a delta is cut off")
        self.at += num
        return self.data[self.at - num : self.at]

    def number(self) -> int:
        value = shift = 0
        while (byte := self.take(1)[0]) & 128:
            value += (byte & 127) << shift
            shift += 7
        return value + (byte << shift)

    def bits(self, num: int) -> Bits:
        return np.unpackbits(np.frombuffer(self.take(-(-num // 8)), np.uint8), count=num, bitorder="little") == 1

    def rest_bits(self) -> Ints:
        return np.unpackbits(np.frombuffer(self.take(len(self.data) - self.at), np.uint8), bitorder="little")
