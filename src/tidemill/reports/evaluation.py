"""Statistics of an evaluation: pass@1, pass@k, intervals over tasks, paired differences. Pure functions.

Samples of one task are not independent, tasks are: every interval and test here treats the task as the unit.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from tidemill.core.records import Outcome, Record


class EvalRow(Record, frozen=True):
    """One attempt of an evaluation: a line of `eval.jsonl`."""

    version: int
    task_id: str
    sample: int
    """0, 1, … of the same task at the same version."""
    reward: float
    solved: bool
    sampled_tokens: int
    total_tokens: int
    turns: int
    outcome: Outcome
    episode: str
    """Blob hash of the `Episode`."""
    family: str = ""
    package: str = ""
    measures: dict[str, float] = {}
    """Of the episode, such as `ast_equal`."""


def read_rows(path: Path) -> list[EvalRow]:
    """Rows of an `eval.jsonl`; none where there is no file. A last line cut off by a kill is skipped, and a repeated
    (version, task, sample) counts once: an evaluator that was killed may have written it again.
    Raises `ValueError` with the line for any other damage."""
    if not path.exists():
        return []
    rows: dict[tuple[int, str, int], EvalRow] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = msgspec.json.decode(line, type=EvalRow)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        rows.setdefault((row.version, row.task_id, row.sample), row)
    return list(rows.values())


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased chance that one of k samples solves the task: 1 − C(n−c, k) / C(n, k).

    Chen et al. 2021 (arXiv 2107.03374), equation 1. Raises `ValueError` where k > n: it cannot be estimated.
    """
    if not 0 <= num_solved <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_solved} solved in {num_samples} samples: sample each task at least k times")
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def by_task(rows: Iterable[EvalRow], value: Callable[[EvalRow], float]) -> dict[str, list[float]]:
    """Task → the values of its samples."""
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row.task_id, []).append(value(row))
    return values


def bootstrap_interval(
    values: Sequence[float], *, seed: int = 0, level: float = 0.95, num_resamples: int = 10_000
) -> tuple[float, float]:
    """Percentile interval of the mean over tasks, resampled with replacement (Efron 1979). `values`: one per task."""
    if not values:
        raise ValueError("no values to resample: evaluate at least one task")
    array = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(seed).integers(0, len(array), (num_resamples, len(array)))
    means = array[draws].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


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


def paired_difference(
    before: Mapping[str, float], after: Mapping[str, float], *, seed: int = 0, num_resamples: int = 10_000
) -> Difference:
    """Mean of `after − before` over their common tasks, its bootstrap interval, and a two-sided sign-flip test.

    The test asks how often random signs give a mean as large: exact where 2^n ≤ `num_resamples`, else with
    (hits + 1) / (draws + 1), Phipson & Smyth 2010. Raises `ValueError` where no task is common to both.
    """
    common = sorted(before.keys() & after.keys())
    if not common:
        raise ValueError("the two evaluations have no task in common: evaluate both on the same tasks")
    gaps = np.array([after[task] - before[task] for task in common])
    low, high = bootstrap_interval(gaps.tolist(), seed=seed, num_resamples=num_resamples)
    moved = gaps[gaps != 0]  # a task without a difference has no sign to flip
    return Difference(
        mean=float(gaps.mean()),
        low=low,
        high=high,
        p_value=_sign_flip(moved, seed, num_resamples),
        num_tasks=len(gaps),
        num_better=int((gaps > 0).sum()),
        num_worse=int((gaps < 0).sum()),
    )


def _sign_flip(gaps: np.ndarray[tuple[int], np.dtype[np.float64]], seed: int, num_resamples: int) -> float:
    if not len(gaps):
        return 1.0
    observed = abs(gaps.sum()) * (1 - 1e-12)
    if 2 ** len(gaps) <= num_resamples:
        bits = (np.arange(2 ** len(gaps))[:, None] >> np.arange(len(gaps))) & 1
        return float(np.mean(np.abs((1.0 - 2.0 * bits) @ gaps) >= observed))
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (num_resamples, len(gaps)))
    return float((np.sum(np.abs(signs @ gaps) >= observed) + 1) / (num_resamples + 1))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """An evaluation, or a part of one."""

    num_tasks: int
    num_samples: int
    pass_1: float
    """Mean over tasks of the share of solved samples."""
    low: float
    high: float
    best_of: dict[int, float]
    """k → pass@k, for every k that each task has samples for."""
    reward: float
    sampled_tokens: float
    """Mean of an attempt."""
    turns: float
    outcomes: dict[str, int]


def summarize(rows: Sequence[EvalRow], *, ks: Sequence[int] = (1, 2, 4, 8, 16), seed: int = 0) -> Summary:
    """Raises `ValueError` for no rows."""
    if not rows:
        raise ValueError("no rows to summarize: the evaluation is empty")
    solved = by_task(rows, lambda row: float(row.solved))
    rates = [sum(values) / len(values) for values in solved.values()]
    low, high = bootstrap_interval(rates, seed=seed)
    fewest = min(len(values) for values in solved.values())
    return Summary(
        num_tasks=len(solved),
        num_samples=len(rows),
        pass_1=sum(rates) / len(rates),
        low=low,
        high=high,
        best_of={
            k: sum(pass_at_k(len(v), int(sum(v)), k) for v in solved.values()) / len(solved) for k in ks if k <= fewest
        },
        reward=sum(row.reward for row in rows) / len(rows),
        sampled_tokens=sum(row.sampled_tokens for row in rows) / len(rows),
        turns=sum(row.turns for row in rows) / len(rows),
        outcomes=dict(sorted(Counter(row.outcome for row in rows).items())),
    )


K = TypeVar("K", bound=Hashable)


def by_key(rows: Sequence[EvalRow], key: Callable[[EvalRow], K]) -> dict[K, Summary]:
    """Summaries by version, family, package, … in the order in which the keys first occur."""
    parts: dict[K, list[EvalRow]] = {}
    for row in rows:
        parts.setdefault(key(row), []).append(row)
    return {name: summarize(part) for name, part in parts.items()}


def solve_rates(rows: Iterable[EvalRow]) -> dict[str, float]:
    """Task → share of solved samples: what `paired_difference` compares."""
    return {task: sum(values) / len(values) for task, values in by_task(rows, lambda row: float(row.solved)).items()}


def table(summaries: Mapping[str, Summary], heading: str) -> list[str]:
    """Lines of plain text: a row per part, pass@1 with its 95 % interval, best-of-k, tokens and turns."""
    ks = sorted({k for summary in summaries.values() for k in summary.best_of if k > 1})
    header = [heading, "tasks", "pass@1", "95 %", *(f"pass@{k}" for k in ks), "reward", "tokens", "turns"]
    cells = [header]
    for name, s in summaries.items():
        best = [f"{s.best_of[k]:.3f}" if k in s.best_of else "–" for k in ks]
        costs = [f"{s.reward:.3f}", f"{s.sampled_tokens:.0f}", f"{s.turns:.1f}"]
        cells.append([name, str(s.num_tasks), f"{s.pass_1:.3f}", f"{s.low:.3f}–{s.high:.3f}", *best, *costs])
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
