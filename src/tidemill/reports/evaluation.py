"""Rows of an evaluation, and what they add up to: pass@1, pass@k, costs. Pure functions; intervals: `resampling`."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from tidemill.core.records import Outcome, Record
from tidemill.reports.resampling import bootstrap_interval


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
    (version, task, sample) counts once: an evaluator that was killed may have written it again, or tried an `env_fault`
    again. Raises `ValueError` with the line for any other damage."""
    if not path.exists():
        return []
    rows: dict[tuple[int, str, int], EvalRow] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = msgspec.json.decode(line, type=EvalRow)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        known = rows.get((row.version, row.task_id, row.sample))
        if known is None or known.outcome == "env_fault":
            rows[row.version, row.task_id, row.sample] = row
    return list(rows.values())


def without_faults(rows: Iterable[EvalRow]) -> list[EvalRow]:
    """Those that say something of the agent."""
    return [row for row in rows if row.outcome != "env_fault"]


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
    """`env_fault`s are told among the outcomes, and count nowhere else. Raises `ValueError` for no other rows."""
    outcomes = Counter(row.outcome for row in rows)
    rows = without_faults(rows)
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
        outcomes=dict(sorted(outcomes.items())),
    )


K = TypeVar("K", bound=Hashable)


def by_key(rows: Sequence[EvalRow], key: Callable[[EvalRow], K]) -> dict[K, Summary]:
    """Summaries by version, family, package, … in the order in which the keys first occur."""
    parts: dict[K, list[EvalRow]] = {}
    for row in rows:
        parts.setdefault(key(row), []).append(row)
    return {name: summarize(part) for name, part in parts.items() if without_faults(part)}


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
    return columns(cells)


def columns(cells: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines of plain text; all rows have as many cells."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
