"""Bit vectors as Golomb–Rice runs: the one entropy coder of the sparse coding.

A vector is written as the gaps between its rarer bits (its *items*): gap g as the quotient g >> r in unary and the
remainder in r bits. For independent bits of any density that costs within 4 % of their entropy, and within 1 % where
items are rare (Golomb 1966; Rice 1979). Unlike an arithmetic coder's, its loops vectorise, and no table is sent.
Quotients of all vectors lie in one stream, remainders in another, so that each is unpacked at once.
"""

from dataclasses import dataclass, field
from math import floor, log, log2, sqrt

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import DeltaError
from tidemill.deltas import plain
from tidemill.deltas.kernels import Kernels
from tidemill.deltas.wire import Reader, varint
from tidemill.deltas.words import I64

MAX_SHIFT = 31
_INVERT = 0x20
_GOLDEN = (sqrt(5) - 1) / 2


@dataclass
class RunWriter:
    """Collects vectors; their heads go into `head`, their runs into two streams."""

    head: bytearray = field(default_factory=bytearray)
    _quotients: list[I64] = field(default_factory=list)
    _remainders: list[I64] = field(default_factory=list)
    _widths: list[I64] = field(default_factory=list)

    def put_items(self, items: I64, invert: bool) -> None:
        """`items`: where the ones lie (the zeros, where inverted), ascending."""
        gaps = items.copy()
        gaps[1:] -= items[:-1] + 1
        shift = best_shift(gaps)
        self.head.append(shift | (_INVERT if invert else 0))
        self.head += varint(gaps.size)
        self._quotients.append(gaps >> shift)
        if shift:
            self._remainders.append(gaps & ((1 << shift) - 1))
            self._widths.append(np.full(gaps.size, shift, np.int64))

    def put_bits(self, bits: NDArray[np.bool_]) -> None:
        invert = 2 * int(np.count_nonzero(bits)) > bits.size
        self.put_items(np.flatnonzero(bits != invert), invert)

    def streams(self) -> bytes:
        """varint length of the quotients, quotients, remainders."""
        none = [np.zeros(0, np.int64)]
        quotients = plain.pack_quotients(np.concatenate(self._quotients or none))
        remainders = plain.pack_fields(np.concatenate(self._remainders or none), np.concatenate(self._widths or none))
        return varint(len(quotients)) + quotients + remainders


@dataclass
class RunReader:
    """The heads of vectors as they are read; then, all at once, their gaps."""

    shifts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    inverts: list[bool] = field(default_factory=list)

    def read_head(self, reader: Reader) -> int:
        """Returns the vector's number."""
        first = reader.byte()
        if first > (_INVERT | MAX_SHIFT):
            raise DeltaError(f"damaged delta: {first:#x} cannot begin a vector")
        self.shifts.append(first & MAX_SHIFT)
        self.inverts.append(bool(first & _INVERT))
        self.counts.append(reader.varint())
        return len(self.counts) - 1

    def read_gaps(self, reader: Reader, loops: Kernels) -> I64:
        """Gaps of all vectors, one after the other. Raises `DeltaError`."""
        num_bytes = reader.varint()
        total = sum(self.counts)
        if total > 8 * num_bytes:
            raise DeltaError("damaged delta: more runs than bits")
        gaps: I64 = loops.quotients(reader.take(num_bytes), total)
        counts = np.array(self.counts, np.int64)
        shifts = np.repeat(np.array(self.shifts, np.int64), counts)
        remainders = reader.take((int(shifts.sum()) + 7) // 8)
        return (gaps << shifts) + loops.fields(remainders, shifts)


def best_shift(gaps: I64) -> int:
    """The Rice parameter that is best for geometric gaps of this mean (Kiely, IPN Progress Report 42-159, 2004)."""
    if gaps.size == 0:
        return 0
    mean = int(gaps.sum()) / gaps.size
    if mean < 0.7:
        return 0
    return min(max(1 + floor(log2(log(_GOLDEN) / log(mean / (mean + 1)))), 0), MAX_SHIFT)
