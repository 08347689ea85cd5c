"""The sparse coding: where weights moved, and how far, given what the receiver already holds.

Positions. Whether a weight's bits move depends on its ulp, so the exponent of the OLD weight is the context: for each
group of exponent classes one bit vector (moved or not) over the group's weights alone, written as runs (`runs`).

Values. Moves are distances in the dtype's order (`words.ordered`), mostly one ulp. In each group of classes:
the direction (towards zero or away: small weights mostly grow), the octave of the distance in unary planes, the upper
mantissa bit of octave 1, and the remaining mantissa bits as they are. Where it pays, each column of a matrix names its
prevailing sign and directions are coded given that: rows of an embedding whose tokens did not occur all move alike.

    flags            u8          bit 0: column signs are there
    column signs     [ceil(columns / 8)]  bit j (least significant first): column j's moves are mostly negative
    first, last      u8, u8      classes that have moved weights
    position starts  [ceil((last − first) / 8)]  bit i: class first + 1 + i begins a new group
    value starts     the same
    per position group: vector head
    per value group:  varint number of planes; vector heads: direction (two where columns have signs),
                      planes, upper mantissa bit (where there is a plane)
    varint bytes of quotients; quotients; remainders; mantissas

A vector head is a u8 (bits 0–4 Rice shift, bit 5: the items are the zeros) and a varint number of items.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import DeltaError
from tidemill.deltas import contexts, plain
from tidemill.deltas.kernels import Kernels
from tidemill.deltas.runs import RunReader, RunWriter
from tidemill.deltas.wire import Reader, varint
from tidemill.deltas.words import I64, U8, Kind, Words, ordered, unordered

_COLUMN_SIGNS = 1
_FIRST_PLANE = 3


@dataclass(frozen=True)
class Place:
    """What a piece of a tensor is part of."""

    kind: Kind
    columns: int
    """Of the matrix; 0 where it is none."""
    offset: int
    """The piece's first element, in the flat tensor."""
    loops: Kernels


@dataclass(frozen=True, eq=False)
class Moves:
    """What changed in a piece of a tensor, and how it would be coded. All arrays over moved weights, by position."""

    index: I64
    classes: U8
    negative: NDArray[np.bool_]
    """Of the move."""
    old_negative: NDArray[np.bool_]
    magnitude: I64
    """In ulps, ≥ 1."""
    octave: I64
    """Bit length of the magnitude, less one."""
    num: I64
    """[classes]: weights of each class, moved or not."""
    octaves: I64
    """[classes, octave]"""

    def estimate_bytes(self) -> float:
        return contexts.sparse_bits(self.num, self.octaves) / 8


def moves(old: Words, new: Words, index: I64, place: Place) -> Moves:
    """Look at the weights `index` that differ between `old` and `new` (flat, at most 32 bits a word)."""
    kind = place.kind
    was, now = old[index], new[index]
    signed = np.dtype(f"<i{kind.bits // 8}")
    distance = (ordered(now, kind) - ordered(was, kind)).view(signed).astype(np.int64)
    magnitude = np.abs(distance)
    octave = np.frexp(magnitude.astype(np.float64))[1].astype(np.int64) - 1
    classes = _classes(was, kind)
    num_classes = kind.exponent_mask + 1
    table = np.bincount(classes.astype(np.int64) * 32 + octave, minlength=num_classes * 32)
    return Moves(
        index=index,
        classes=classes,
        negative=distance < 0,
        old_negative=_signs(was, kind),
        magnitude=magnitude,
        octave=octave,
        num=place.loops.class_counts(old, kind.exponent_shift, kind.exponent_mask),
        octaves=table.reshape(num_classes, 32),
    )


def encode(old: Words, found: Moves, place: Place) -> bytes:
    """The payload, from the flat old words and what `moves` found."""
    columns = place.columns
    shrinks = found.negative ^ found.old_negative
    sub = np.zeros(found.index.size, np.bool_)
    flags, signs = 0, b""
    if columns:
        column = (found.index + place.offset) % columns
        mostly = np.bincount(column, weights=1.0 - 2.0 * found.negative, minlength=columns) < 0
        with_signs = mostly[column] ^ found.old_negative
        if _direction_bits(shrinks, with_signs) + columns + 2 * contexts.HEAD_BITS < _direction_bits(shrinks, sub):
            flags, sub = _COLUMN_SIGNS, with_signs
            signs = np.packbits(mostly, bitorder="little").tobytes()
    num_moved = found.octaves.sum(axis=1)
    by_position = contexts.position_groups(found.num, num_moved)
    num_shrinks = np.bincount(found.classes, weights=shrinks, minlength=num_moved.size).astype(np.int64)
    by_value = contexts.value_groups(found.octaves, num_shrinks)
    used = np.flatnonzero(num_moved)
    first, last = int(used[0]), int(used[-1])

    writer = RunWriter()
    _write_positions(writer, old, found, by_position, place)
    _write_values(writer, found, by_value, shrinks, sub, two_signs=bool(flags))
    wide = found.octave >= 2
    mantissas = plain.pack_fields(
        found.magnitude[wide] & ((1 << found.octave[wide]) - 1), found.octave[wide]
    )  # octave 1 has its one mantissa bit in a vector
    starts = b"".join(
        np.packbits(np.diff(group[first : last + 1].astype(np.int64)) > 0, bitorder="little").tobytes()
        for group in (by_position, by_value)
    )
    head = bytes([flags]) + signs + bytes([first, last]) + starts
    return head + bytes(writer.head) + writer.streams() + mantissas


def _write_positions(writer: RunWriter, old: Words, found: Moves, group: U8, place: Place) -> None:
    member = group != contexts.NO_GROUP
    weights = np.bincount(group[member], weights=found.num[member]).astype(np.int64)
    ranks = place.loops.ranks(old, place.kind.exponent_shift, group, found.index)
    groups = group[found.classes]
    order = np.argsort(groups, kind="stable")
    moved = np.bincount(groups, minlength=weights.size)
    for num, part in zip(weights.tolist(), np.split(ranks[order], np.cumsum(moved)[:-1]), strict=True):
        if 2 * part.size > num:
            still = np.ones(num, np.bool_)
            still[part] = False
            writer.put_items(np.flatnonzero(still), invert=True)
        else:
            writer.put_items(part, invert=False)


def _write_values(
    writer: RunWriter,
    found: Moves,
    group: U8,
    shrinks: NDArray[np.bool_],
    sub: NDArray[np.bool_],
    *,
    two_signs: bool,
) -> None:
    groups = group[found.classes]
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups))
    for members in np.split(order, ends[:-1]):
        octave = found.octave[members]
        num_planes = int(octave.max())
        writer.head += varint(num_planes)
        if two_signs:
            side = sub[members]
            writer.put_bits(shrinks[members[~side]])
            writer.put_bits(shrinks[members[side]])
        else:
            writer.put_bits(shrinks[members])
        for plane in range(num_planes):
            writer.put_bits(octave[octave >= plane] > plane)
        if num_planes:
            writer.put_bits((found.magnitude[members[octave == 1]] & 1).astype(np.bool_))


def decode(payload: bytes, old: Words, out: Words, place: Place) -> None:
    """Write the new words into `out`, flat like `old`. Raises `DeltaError` for damage, or other old words."""
    kind, columns, loops = place.kind, place.columns, place.loops
    reader = Reader(payload)
    flags = reader.byte()
    if flags & ~_COLUMN_SIGNS or (flags and not columns):
        raise DeltaError(f"damaged delta: flags {flags:#x} of a sparse part")
    mostly = _bits(reader, columns) if flags else None
    first, last = reader.byte(), reader.byte()
    if not first <= last <= kind.exponent_mask:
        raise DeltaError(f"damaged delta: classes {first} to {last}")
    by_position, by_value = (_groups(reader, first, last, kind.exponent_mask + 1) for _ in range(2))
    runs = RunReader()
    num_positions = int(by_position[last]) + 1
    for _ in range(num_positions):
        runs.read_head(reader)
    rows = [_value_heads(runs, reader, two_signs=bool(flags)) for _ in range(int(by_value[last]) + 1)]
    gaps = runs.read_gaps(reader, loops)
    counts = np.array(runs.counts, np.int64)
    starts = np.cumsum(counts) - counts
    invert = np.array(runs.inverts, np.bool_)

    index = loops.positions(
        old, kind.exponent_shift, by_position, invert[:num_positions], gaps[: starts[num_positions]],
        counts[:num_positions],
    )  # fmt: skip
    was = old[index]
    old_negative = _signs(was, kind)
    value_group = by_value[_classes(was, kind)]
    if mostly is None:
        sub = np.zeros(index.size, np.uint8)
    else:
        sub = (mostly[(index + place.offset) % columns] ^ old_negative).astype(np.uint8)
    vectors = np.full((len(rows), max(map(len, rows))), -1, np.int32)
    for number, row in enumerate(rows):
        vectors[number, : len(row)] = row
    value_vectors = np.where(vectors >= 0, vectors - num_positions, -1).astype(np.int32)
    shrinks, octave, upper = loops.values(
        value_group, sub, value_vectors, gaps, starts[num_positions:], counts[num_positions:], invert[num_positions:]
    )
    mantissas = loops.fields(reader.rest(), np.where(octave >= 2, octave, 0))
    magnitude = (np.int64(1) << octave) | np.where(octave == 1, upper, mantissas)
    distance = np.where(shrinks ^ old_negative, -magnitude, magnitude)
    np.copyto(out, old)
    out[index] = unordered((ordered(was, kind) + distance.astype(old.dtype)).astype(old.dtype), kind)


def _value_heads(runs: RunReader, reader: Reader, *, two_signs: bool) -> list[int]:
    num_planes = reader.varint()
    if num_planes > 31:
        raise DeltaError(f"damaged delta: {num_planes} planes")
    sign = runs.read_head(reader)
    other = runs.read_head(reader) if two_signs else -1
    planes = [runs.read_head(reader) for _ in range(num_planes)]
    upper = runs.read_head(reader) if num_planes else -1
    return [sign, other, upper, *planes]


def _bits(reader: Reader, num: int) -> NDArray[np.bool_]:
    data = np.frombuffer(reader.take((num + 7) // 8), np.uint8)
    return np.unpackbits(data, count=num, bitorder="little").astype(np.bool_)


def _groups(reader: Reader, first: int, last: int, num_classes: int) -> U8:
    group = np.full(num_classes, contexts.NO_GROUP, np.uint8)
    starts = _bits(reader, last - first)
    group[first] = 0
    group[first + 1 : last + 1] = np.cumsum(starts)
    return group


def _classes(words: Words, kind: Kind) -> U8:
    shifted: Any = words >> words.dtype.type(kind.exponent_shift)
    return (shifted & words.dtype.type(kind.exponent_mask)).astype(np.uint8)


def _signs(words: Words, kind: Kind) -> NDArray[np.bool_]:
    if not kind.is_float:
        return np.zeros(words.size, np.bool_)
    return (words >> words.dtype.type(kind.bits - 1)).astype(np.bool_)


def _direction_bits(shrinks: NDArray[np.bool_], sub: NDArray[np.bool_]) -> float:
    counts = np.bincount(2 * sub + shrinks, minlength=4).tolist()
    return contexts.entropy(counts[:2]) + contexts.entropy(counts[2:])
