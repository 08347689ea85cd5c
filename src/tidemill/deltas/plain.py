"""The codec's inner loops in numpy. `compiled` has the same functions in numba; both read and write the same bytes.

What they take, return and refuse is said here, for both. All arrays are flat. `group` maps an exponent class to the
number of a group, 255 meaning none.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import DeltaError
from tidemill.deltas.words import I64, U8, Words

NO_GROUP = 255
OUTSIDE = "damaged delta: a position lies outside the tensor"
LEFT_OVER = "damaged delta: values are left over"


def class_counts(old: Words, shift: int, mask: int) -> I64:
    """How many weights there are of each class, int64 [mask + 1]."""
    return np.bincount(_classes(old, shift, mask), minlength=mask + 1)


def ranks(old: Words, shift: int, group: U8, moved: I64) -> I64:
    """How many weights of its own group lie before each of the weights `moved` (indices, ascending), int64 [moved]."""
    groups = group[_classes(old, shift, group.size - 1)]
    of_moved = groups[moved]
    found = np.empty(moved.size, np.int64)
    for number in np.unique(of_moved):
        members = of_moved == number
        found[members] = np.cumsum(groups == number)[moved[members]] - 1
    return found


def positions(old: Words, shift: int, group: U8, invert: NDArray[np.bool_], gaps: I64, num_items: I64) -> I64:
    """Indices of the weights that moved, ascending, from the gaps between items within each group.

    `gaps` holds `num_items[g]` of them for each group g. An item is a weight that moved, or, in an inverted group, one
    that did not. Raises `DeltaError` for gaps that lead outside.
    """
    groups = group[_classes(old, shift, group.size - 1)]
    found = [np.zeros(0, np.int64)]
    start = 0
    for number, num in enumerate(num_items.tolist()):
        members = np.flatnonzero(groups == number)
        places = np.cumsum(gaps[start : start + num] + 1) - 1
        start += num
        if num and places[-1] >= members.size:
            raise DeltaError(OUTSIDE)
        if invert[number]:
            found.append(np.delete(members, places))
        else:
            found.append(members[places])
    return np.sort(np.concatenate(found))


def quotients(data: bytes, num: int) -> I64:
    """`num` unary numbers: each as many zero bits, least significant first, and a one. Raises `DeltaError`."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    ones = np.flatnonzero(bits)
    check_found(num, ones.size, "runs")
    return np.diff(ones, prepend=-1) - 1


def fields(data: bytes, widths: I64) -> I64:
    """Numbers of `widths` bits (0 to 31) each, least significant bit first, without gaps. Raises `DeltaError`."""
    ends = np.cumsum(widths)
    check_found((int(widths.sum()) + 7) // 8, len(data), "bytes")
    padded = np.frombuffer(data + bytes(8), np.uint8).astype(np.uint64)
    starts = ends - widths
    first = starts >> 3
    value = np.zeros(widths.size, np.uint64)
    for byte in range(5):
        value |= padded[first + byte] << np.uint64(8 * byte)
    value >>= (starts & 7).astype(np.uint64)
    return (value & ((np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1))).astype(np.int64)


def check_found(announced: int, found: int, what: str) -> None:
    if announced != found:
        raise DeltaError(f"damaged delta: {announced} {what} were announced, {found} found")


def pack_quotients(values: I64) -> bytes:
    """The inverse of `quotients`."""
    ends = np.cumsum(values + 1)
    bits = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
    bits[ends - 1] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def pack_fields(values: I64, widths: I64) -> bytes:
    """The inverse of `fields`."""
    ends = np.cumsum(widths)
    num_bits = int(ends[-1]) if ends.size else 0
    bits = np.zeros(num_bits, np.uint8)
    starts = ends - widths
    for bit in range(int(widths.max()) if widths.size else 0):
        wide = widths > bit
        bits[starts[wide] + bit] = (values[wide] >> bit) & 1
    return np.packbits(bits, bitorder="little").tobytes()


def draw(gaps: I64, num: int, invert: bool) -> NDArray[np.bool_]:
    """A vector of `num` bits from the gaps between its items. Raises `DeltaError` for gaps that lead outside."""
    bits = np.full(num, invert, np.bool_)
    places = np.cumsum(gaps + 1) - 1
    if places.size and places[-1] >= num:
        raise DeltaError("damaged delta: a value lies outside its group")
    bits[places] = not invert
    return bits


def values(
    value_group: U8,
    sub: U8,
    vectors: NDArray[np.int32],
    gaps: I64,
    starts: I64,
    counts: I64,
    invert: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], I64, NDArray[np.bool_]]:
    """Sign bit, octave and upper mantissa bit (where the octave is 1) of each moved weight, in order of position.

    `vectors` [groups, 2 signs + 1 mantissa + planes]: the number of each vector, −1 where there is none. Vector v
    has `counts[v]` gaps from `starts[v]`. Raises `DeltaError` for vectors that do not fit.
    """
    num = value_group.size
    sign, octave, upper = np.zeros(num, np.bool_), np.zeros(num, np.int64), np.zeros(num, np.bool_)
    used = 0

    def bits(vector: int, size: int) -> NDArray[np.bool_]:
        nonlocal used
        used += int(counts[vector])
        return draw(gaps[starts[vector] : starts[vector] + counts[vector]], size, bool(invert[vector]))

    for number, row in enumerate(vectors):
        members = np.flatnonzero(value_group == number)
        for side in (0, 1):
            if row[side] >= 0:
                here = members[sub[members] == side]
                sign[here] = bits(row[side], here.size)
        live = members
        for plane in row[3:]:
            if plane < 0:
                break
            live = live[bits(plane, live.size)]
            octave[live] += 1
        if row[2] >= 0:
            ones = members[octave[members] == 1]
            upper[ones] = bits(row[2], ones.size)
    if used != int(counts[_value_vectors(vectors)].sum()):
        raise DeltaError(LEFT_OVER)
    return sign, octave, upper


def _value_vectors(vectors: NDArray[np.int32]) -> NDArray[Any]:
    return vectors[vectors >= 0]


def _classes(old: Words, shift: int, mask: int) -> NDArray[Any]:
    return ((old >> old.dtype.type(shift)) & old.dtype.type(mask)).astype(np.uint8)
