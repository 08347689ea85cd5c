"""Which exponent classes share statistics: few groups, each worth what its head costs.

Decisions of the encoder alone: whatever is chosen here, the decoder reads it from the delta.
"""

from math import log2

import numpy as np
from numpy.typing import NDArray

HEAD_BITS = 20.0
"""About what one vector costs beside its runs."""
NO_GROUP = 255


def position_groups(num: NDArray[np.int64], moved: NDArray[np.int64]) -> NDArray[np.uint8]:
    """A group per class, 255 for classes in which nothing moved.

    `num` and `moved` [classes]: weights, and moved weights, of each class. Groups are runs of classes.
    """
    spans = _span(moved)
    group = np.full(num.size, NO_GROUP, np.uint8)
    number = 0
    held = (0, 0)
    for index in spans:
        new = (int(num[index]), int(moved[index]))
        both = (held[0] + new[0], held[1] + new[1])
        if index > spans.start and _bernoulli(*held) + _bernoulli(*new) + HEAD_BITS < _bernoulli(*both):
            number += 1
            held = new
        else:
            held = both
        group[index] = number
    return group


def value_groups(octaves: NDArray[np.int64], shrinks: NDArray[np.int64]) -> NDArray[np.uint8]:
    """A group per class, likewise: `octaves` [classes, octave] counts moves, `shrinks` [classes] those towards zero."""
    counts = octaves.sum(axis=1)
    octaves = octaves[:, : int(np.flatnonzero(octaves.any(axis=0)).max(initial=0)) + 1]
    spans = _span(counts)
    group = np.full(counts.size, NO_GROUP, np.uint8)
    number = 0
    held: list[int] = [0] * (octaves.shape[1] + 1)
    held_bits = 0.0
    for index in spans:
        new = [*octaves[index].tolist(), int(shrinks[index])]
        both = [a + b for a, b in zip(held, new, strict=True)]
        new_bits, both_bits = _value_bits(new), _value_bits(both)
        num_planes = sum(1 for count in new[:-1] if count)
        if index > spans.start and held_bits + new_bits + HEAD_BITS * (num_planes + 1) < both_bits:
            number += 1
            held, held_bits = new, new_bits
        else:
            held, held_bits = both, both_bits
        group[index] = number
    return group


def sparse_bits(num: NDArray[np.int64], octaves: NDArray[np.int64]) -> float:
    """About how many bits the sparse coding will take: `num` [classes], `octaves` [classes, octave]."""
    moved = octaves.sum(axis=1)
    bits = sum(_bernoulli(n, k) for n, k in zip(num.tolist(), moved.tolist(), strict=True) if k)
    mantissas = (octaves * np.arange(octaves.shape[1])).sum()
    return bits + sum(entropy(row) for row in octaves[moved > 0].tolist()) + float(mantissas + moved.sum())


def _span(counts: NDArray[np.int64]) -> range:
    used = np.flatnonzero(counts)
    return range(int(used[0]), int(used[-1]) + 1) if used.size else range(0)


def _bernoulli(num: int, ones: int) -> float:
    return _weight(num) - _weight(ones) - _weight(num - ones)


def entropy(counts: list[int]) -> float:
    """Bits of that many symbols of each kind, by their own frequencies."""
    return _weight(sum(counts)) - sum([_weight(count) for count in counts])


def _weight(count: int) -> float:
    return count * log2(count) if count > 1 else 0.0


def _value_bits(counts: list[int]) -> float:
    octaves, shrinks = counts[:-1], counts[-1]
    return entropy(octaves) + entropy([shrinks, sum(octaves) - shrinks])
