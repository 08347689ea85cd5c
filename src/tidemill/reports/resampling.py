"""Intervals and tests over tasks. Samples of one task are not independent, tasks are: the task is the unit throughout.

A figure here is a ratio of sums over tasks, Σ num / Σ den: with den = 1 a mean over tasks, else a share of something
that not every task has (of repairs, of submissions).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Share = tuple[float, float]
"""Numerator and denominator of one task."""
NUM_RESAMPLES = 10_000
NOTHING = 1e-9
"""Less than any share of one task: what rounding leaves of a denominator of 0."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure of one evaluation, with its interval."""

    value: float
    low: float
    high: float
    num_tasks: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of two evaluations on the same tasks."""

    mean: float
    low: float
    high: float
    p_value: float
    num_tasks: int
    num_better: int
    num_worse: int


def estimate(
    shares: Sequence[Share], *, seed: int = 0, level: float = 0.95, num_resamples: int = NUM_RESAMPLES
) -> Estimate | None:
    """Σ num / Σ den with its percentile interval, tasks resampled with replacement (Efron 1979).

    None where no task has anything to count. A resample in which Σ den is 0 says nothing, and is left out.
    """
    num, den = _columns(shares)
    if not den.sum() > NOTHING:
        return None
    draws = _draws(len(num), seed, num_resamples)
    low, high = _interval(_ratio(num[draws].sum(1), den[draws].sum(1)), level)
    return Estimate(value=float(num.sum() / den.sum()), low=low, high=high, num_tasks=len(num))


def bootstrap_interval(
    values: Sequence[float], *, seed: int = 0, level: float = 0.95, num_resamples: int = NUM_RESAMPLES
) -> tuple[float, float]:
    """Of the mean over tasks. `values`: one per task."""
    if not values:
        raise ValueError("no values to resample: evaluate at least one task")
    found = estimate([(value, 1.0) for value in values], seed=seed, level=level, num_resamples=num_resamples)
    assert found is not None
    return found.low, found.high


def paired_difference(
    before: Mapping[str, float], after: Mapping[str, float], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> Difference:
    """Mean of `after − before` over their common tasks: see `share_difference`. Raises `ValueError` where there is no
    common task."""
    found = share_difference(
        {task: (value, 1.0) for task, value in before.items()},
        {task: (value, 1.0) for task, value in after.items()},
        seed=seed,
        num_resamples=num_resamples,
    )
    assert found is not None
    return found


def share_difference(
    before: Mapping[str, Share], after: Mapping[str, Share], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> Difference | None:
    """`after − before` of Σ num / Σ den over the common tasks, with its paired bootstrap interval, and a p-value.

    The interval resamples tasks, each with both of its sides. The p-value is that of a two-sided sign-flip permutation
    test over tasks: how often exchanging before and after in random tasks gives a difference as large. It is exact
    where 2^n of the n tasks that differ is at most `num_resamples`, else (hits + 1) / (draws + 1), as Phipson & Smyth
    (2010) ask.
    None where one side has nothing to count. Raises `ValueError` where no task is common to both.
    """
    common = sorted(before.keys() & after.keys())
    if not common:
        raise ValueError("the two evaluations have no task in common: evaluate both on the same tasks")
    old, new = [_columns([side[task] for task in common]) for side in (before, after)]
    if not (old[1].sum() > NOTHING and new[1].sum() > NOTHING):
        return None
    draws = _draws(len(common), seed, num_resamples)
    gaps = [_ratio(num[draws].sum(1), den[draws].sum(1)) for num, den in (old, new)]
    low, high = _interval(gaps[1] - gaps[0], 0.95)
    each = _ratio(*new) - _ratio(*old)
    return Difference(
        mean=float(new[0].sum() / new[1].sum() - old[0].sum() / old[1].sum()),
        low=low,
        high=high,
        p_value=_sign_flip(old, new, seed, num_resamples),
        num_tasks=len(common),
        num_better=int((each > 0).sum()),
        num_worse=int((each < 0).sum()),
    )


def _sign_flip(old: tuple[Floats, Floats], new: tuple[Floats, Floats], seed: int, num_resamples: int) -> float:
    moved = (old[0] != new[0]) | (old[1] != new[1])  # exchanging equal sides changes nothing
    num = int(moved.sum())
    if not num:
        return 1.0
    is_exact = 2**num <= num_resamples
    if is_exact:
        flips = ((np.arange(2**num)[:, None] >> np.arange(num)) & 1).astype(np.float64)
    else:
        flips = np.random.default_rng(seed).integers(0, 2, (num_resamples, num)).astype(np.float64)
    shift_num, shift_den = flips @ (new[0] - old[0])[moved], flips @ (new[1] - old[1])[moved]
    found = np.abs(
        _ratio(new[0].sum() - shift_num, new[1].sum() - shift_den)
        - _ratio(old[0].sum() + shift_num, old[1].sum() + shift_den)
    )
    observed = abs(new[0].sum() / new[1].sum() - old[0].sum() / old[1].sum())
    hits = int((~(found < observed - 1e-9)).sum())  # what cannot be told counts as a hit
    return hits / len(flips) if is_exact else (hits + 1) / (len(flips) + 1)


def _columns(shares: Sequence[Share]) -> tuple[Floats, Floats]:
    array = np.asarray(shares, dtype=np.float64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _draws(num_tasks: int, seed: int, num_resamples: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, num_tasks, (num_resamples, num_tasks))


def _ratio(num: Any, den: Any) -> Floats:
    """NaN where there is nothing to count."""
    return np.divide(num, den, out=np.full(np.shape(num), np.nan), where=np.asarray(den) > NOTHING)


def _interval(values: Floats, level: float) -> tuple[float, float]:
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
