"""Tensors as bit patterns: what a dtype's words mean to the codec, and the order in which they lie.

A word is the bit pattern of one weight as an unsigned integer. Two things of a dtype matter to the codec:

- its *order*: a one-to-one map of words to unsigned integers that grows with the value, so that the next larger
  representable number is one further (one *ulp*). For floats: negative patterns are inverted, positive ones get the top
  bit. −0.0 is one below +0.0; NaN patterns lie at both ends. For integers the pattern itself will do.
- its *class*: the exponent field. All weights of a class have ulps of one size, so how likely a weight is to move, and
  how far, depends on its class above all.

References: the map is the usual radix-sort key for IEEE 754 (Herf, "Radix tricks", 2001).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import DeltaError

Words = NDArray[Any]
"""An array of uint8, uint16, uint32 or uint64."""
U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Kind:
    """What the codec knows of a dtype."""

    bits: int
    """Of a word: 8, 16, 32 or 64."""
    exponent_shift: int = 0
    exponent_mask: int = 0
    """0: integers, which have one class."""

    @property
    def word(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def is_float(self) -> bool:
        return self.exponent_mask != 0


KINDS: dict[str, Kind] = {
    "BF16": Kind(16, 7, 0xFF),
    "F16": Kind(16, 10, 0x1F),
    "F32": Kind(32, 23, 0xFF),
    "F64": Kind(64, 55, 0xFF),
    "F8_E4M3": Kind(8, 3, 0x0F),
    "F8_E5M2": Kind(8, 2, 0x1F),
    "F8_E8M0": Kind(8),
    "I8": Kind(8), "U8": Kind(8), "BOOL": Kind(8), "I16": Kind(16), "U16": Kind(16),
    "I32": Kind(32), "U32": Kind(32), "I64": Kind(64), "U64": Kind(64),
}  # fmt: skip
"""By the name that safetensors gives a dtype. The classes of F64 are the upper eight bits of its exponent."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor as bit patterns."""

    dtype: str
    """A key of `KINDS`, such as `BF16`."""
    words: Words
    """Shape of the tensor; of the word type of the dtype, little-endian, C order."""

    @classmethod
    def of(cls, dtype: str, words: Words) -> "Tensor":
        """Checked. Raises `DeltaError` for an unknown dtype, or words of another width; copies only where it must."""
        wanted = kind_of(dtype).word
        if words.dtype.kind != "u" or words.dtype.itemsize != wanted.itemsize:
            raise DeltaError(f"words of {dtype} are {words.dtype}: give a view as {wanted.name}")
        # `ascontiguousarray` would give a scalar a dimension.
        return cls(dtype, np.asarray(words, dtype=wanted, order="C"))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.words.shape


def kind_of(dtype: str) -> Kind:
    """Raises `DeltaError` for a dtype that the codec does not know."""
    if dtype not in KINDS:
        raise DeltaError(f"dtype {dtype!r} is unknown: the codec reads {', '.join(KINDS)}")
    return KINDS[dtype]


def ordered(words: Words, kind: Kind) -> Words:
    """Words → their place in the order, same shape and width."""
    if not kind.is_float:
        return words
    # All ones for a negative pattern, the top bit alone for the others: no branch, so that the loop vectorises.
    return words ^ (_spread_top(words, kind) | words.dtype.type(1 << (kind.bits - 1)))


def unordered(places: Words, kind: Kind) -> Words:
    """The inverse of `ordered`."""
    if not kind.is_float:
        return places
    return places ^ (~_spread_top(places, kind) | places.dtype.type(1 << (kind.bits - 1)))


def _spread_top(words: Words, kind: Kind) -> Words:
    """Each word's top bit, in all its bits."""
    return (words.view(f"<i{kind.bits // 8}") >> (kind.bits - 1)).view(words.dtype)
