"""The codec's inner loops in numba: the functions of `plain`, of the same names, arguments and results.

Only those where compiling pays are here; `kernels` takes the others from `plain`.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from tidemill.core.errors import DeltaError
from tidemill.deltas.plain import LEFT_OVER, OUTSIDE, check_found
from tidemill.deltas.words import I64, U8, Words

FAR = 1 << 60
"""A gap that no tensor reaches."""


@njit(nogil=True, cache=True)
def class_counts(old: Words, shift: int, mask: int) -> I64:
    # Four tables, so that neighbours of one class do not wait for each other's store.
    counts = np.zeros((4, mask + 1), np.int64)
    whole = old.size // 4 * 4
    for i in range(0, whole, 4):
        counts[0, (old[i] >> shift) & mask] += 1
        counts[1, (old[i + 1] >> shift) & mask] += 1
        counts[2, (old[i + 2] >> shift) & mask] += 1
        counts[3, (old[i + 3] >> shift) & mask] += 1
    for i in range(whole, old.size):
        counts[0, (old[i] >> shift) & mask] += 1
    return counts.sum(axis=0)


@njit(nogil=True, cache=True)
def ranks(old: Words, shift: int, group: U8, moved: I64) -> I64:
    mask = group.size - 1
    seen = np.zeros(256, np.int32)
    found = np.empty(moved.size, np.int64)
    start = 0
    for m in range(moved.size):
        end = moved[m]
        for i in range(start, end):
            seen[group[(old[i] >> shift) & mask]] += 1
        g = group[(old[end] >> shift) & mask]
        found[m] = seen[g]
        seen[g] += 1
        start = end + 1
    return found


@njit(nogil=True, cache=True)
def _positions(old: Words, shift: int, group: U8, invert: NDArray[np.bool_], gaps: I64, num_items: I64) -> I64:
    mask = group.size - 1
    # Weights to pass before the next one that moved. In inverted groups it stays 0: each weight is looked at closely.
    ahead = np.full(256, 0x7FFFFFFF, np.int32)
    passing = np.zeros(256, np.int64)
    inverted = np.zeros(256, np.bool_)
    inverted[: invert.size] = invert
    slot = np.zeros(256, np.int64)
    end = np.zeros(256, np.int64)
    total = 0
    for g in range(num_items.size):
        slot[g] = total
        total += num_items[g]
        end[g] = total
        gap = gaps[slot[g]] if num_items[g] > 0 else FAR
        if inverted[g]:
            ahead[g] = 0
            passing[g] = gap
        else:
            ahead[g] = min(gap, 0x7FFFFFFF)
    found = np.empty(old.size, np.int32)
    num = 0
    for i in range(old.size):
        g = group[(old[i] >> shift) & mask]
        left = ahead[g]
        if left > 0:
            ahead[g] = left - 1
            continue
        if inverted[g]:
            passing[g] -= 1
            is_moved = passing[g] >= 0
            if not is_moved:
                slot[g] += 1
                passing[g] = gaps[slot[g]] if slot[g] < end[g] else FAR
        else:
            is_moved = True
            slot[g] += 1
            ahead[g] = min(gaps[slot[g]] if slot[g] < end[g] else FAR, 0x7FFFFFFF)
        if is_moved:
            found[num] = i
            num += 1
    for g in range(num_items.size):
        if slot[g] != end[g]:
            return np.full(1, -1, np.int64)
    return found[:num].astype(np.int64)


def positions(*arguments: Any) -> I64:
    found = _positions(*arguments)
    if found.size and found[0] < 0:
        raise DeltaError(OUTSIDE)
    return found


@njit(nogil=True, cache=True, inline="always")
def _drawn(v: int, ahead: I64, slot: I64, gaps: I64, ends: I64, invert: NDArray[np.bool_]) -> bool:
    """The next bit of vector `v`."""
    left = ahead[v] - 1
    ahead[v] = left
    bit = invert[v]
    if left < 0:
        bit = not bit
        slot[v] += 1
        ahead[v] = gaps[slot[v]] if slot[v] < ends[v] else FAR
    return bit


@njit(nogil=True, cache=True)
def _values(
    value_group: U8,
    sub: U8,
    vectors: NDArray[np.int32],
    gaps: I64,
    starts: I64,
    counts: I64,
    invert: NDArray[np.bool_],
) -> tuple[bool, NDArray[np.bool_], I64, NDArray[np.bool_]]:
    num = value_group.size
    sign, octave, upper = np.zeros(num, np.bool_), np.zeros(num, np.int64), np.zeros(num, np.bool_)
    ahead = np.full(counts.size, FAR, np.int64)
    slot = starts.copy()
    ends = starts + counts
    for v in range(counts.size):
        if counts[v] > 0:
            ahead[v] = gaps[slot[v]]
    num_columns = vectors.shape[1]
    for i in range(num):
        g = value_group[i]  # a row of `vectors` as a view would be slow here
        sign[i] = _drawn(vectors[g, sub[i]], ahead, slot, gaps, ends, invert)
        level = 0
        while 3 + level < num_columns and vectors[g, 3 + level] >= 0:
            if not _drawn(vectors[g, 3 + level], ahead, slot, gaps, ends, invert):
                break
            level += 1
        octave[i] = level
        if level == 1:
            upper[i] = _drawn(vectors[g, 2], ahead, slot, gaps, ends, invert)
    return bool(np.all(slot == ends)), sign, octave, upper


def values(*arguments: Any) -> tuple[NDArray[np.bool_], I64, NDArray[np.bool_]]:
    is_whole, sign, octave, upper = _values(*arguments)
    if not is_whole:
        raise DeltaError(LEFT_OVER)
    return sign, octave, upper


@njit(nogil=True, cache=True)
def _quotients(data: U8, num: int) -> I64:
    found = np.empty(num, np.int64)
    at = 0
    last = -1
    for index in range(data.size):
        byte = data[index]
        for bit in range(8):
            if (byte >> bit) & 1:
                if at < num:
                    found[at] = index * 8 + bit - last - 1
                last = index * 8 + bit
                at += 1
    return found if at == num else np.full(1, -1 - at, np.int64)


def quotients(data: bytes, num: int) -> I64:
    found = _quotients(np.frombuffer(data, np.uint8), num)
    if found.size and found[0] < 0:
        check_found(num, -1 - int(found[0]), "runs")
    return found


@njit(nogil=True, cache=True)
def _fields(data: U8, widths: I64) -> I64:
    found = np.empty(widths.size, np.int64)
    held = np.uint64(0)
    num_held = 0
    at = 0
    for i in range(widths.size):
        width = widths[i]
        while num_held < width:
            held |= np.uint64(data[at]) << np.uint64(num_held)
            at += 1
            num_held += 8
        found[i] = np.int64(held & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)))
        held >>= np.uint64(width)
        num_held -= width
    return found


def fields(data: bytes, widths: I64) -> I64:
    check_found((int(widths.sum()) + 7) // 8, len(data), "bytes")
    return _fields(np.frombuffer(data, np.uint8), widths)
