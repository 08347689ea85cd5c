"""Two evaluations of the same tasks, side by side: how often solved, how, and by what behaviour. Pure functions.

A measure is a share over tasks (see `resampling`): each task brings a numerator and a denominator, from its samples.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tidemill.reports.evaluation import EvalRow, columns, pass_at_k, without_faults
from tidemill.reports.resampling import Difference, Estimate, Share, estimate, share_difference


class Measure(NamedTuple):
    name: str
    of: Callable[[Sequence[EvalRow]], Share]
    """The samples of one task → its numerator and denominator."""
    needs: tuple[str, ...] = ()
    """Named measures of a row that it reads: where one is missing, so is the figure."""
    is_count: bool = False
    """A number per attempt, not a share."""


def solved_in(k: int) -> Measure:
    """pass@k, unbiased (Chen et al. 2021)."""
    return Measure(f"pass@{k}", lambda rows: (pass_at_k(len(rows), sum(row.solved for row in rows), k), 1.0))


def _share(
    name: str, holds: Callable[[EvalRow], float], needs: str = "", of: Callable[[EvalRow], float] | None = None
) -> Measure:
    """Of the attempts for which `of` holds (all of them where None), the share for which `holds` does, too."""

    def share(rows: Sequence[EvalRow]) -> Share:
        bases = [1.0 if of is None else float(of(row)) for row in rows]
        hits = [base * float(holds(row)) for base, row in zip(bases, rows, strict=True)]
        return sum(hits) / len(rows), sum(bases) / len(rows)

    return Measure(name, share, (needs,) if needs else ())


def _count(name: str, value: Callable[[EvalRow], float], needs: str = "") -> Measure:
    def mean(rows: Sequence[EvalRow]) -> Share:
        return sum(value(row) for row in rows) / len(rows), 1.0

    return Measure(name, mean, (needs,) if needs else (), is_count=True)


def _measured(name: str) -> Callable[[EvalRow], float]:
    return lambda row: row.measures[name]


def _submitted(row: EvalRow) -> bool:
    return row.outcome == "submitted"


def _solved(row: EvalRow) -> bool:
    return row.solved


def _corrected(row: EvalRow) -> float:
    return row.measures["corrected_itself"]


REPAIRS = (
    _share("first edit is the repair", _measured("first_edit_correct"), "first_edit_correct"),
    _share("of repairs, equal to the original by syntax tree", _measured("ast_equal"), "ast_equal", of=_solved),
    _count("reward", lambda row: row.reward),
)
BEHAVIOURS = (
    _share("submitted", _submitted),
    _share(
        "of submissions, last edit tested", _measured("tested_before_submit"), "tested_before_submit", of=_submitted
    ),
    _share("tested an edit", _measured("tested_an_edit"), "tested_an_edit"),
    _share(
        "of failed tests of an edit, followed by another edit",
        _measured("tried_again"),
        "tried_again",
        of=_measured("test_told_wrong"),
    ),
    _share("solved by an edit after a failed test", _corrected, "corrected_itself"),
    _share("of repairs, made by an edit after a failed test", _corrected, "corrected_itself", of=_solved),
    _count("accepted edits", _measured("num_edits"), "num_edits"),
    _count("refused edits", _measured("num_edits_refused"), "num_edits_refused"),
    _count("tests", _measured("num_tests"), "num_tests"),
    _count("malformed calls", _measured("malformed_calls"), "malformed_calls"),
    _count("sampled tokens", lambda row: float(row.sampled_tokens)),
    _count("turns", lambda row: float(row.turns)),
)


def solving(rows: Iterable[EvalRow]) -> tuple[Measure, ...]:
    """pass@k for k = 1, 2, 4, … and for the number of samples that every task has."""
    fewest = num_samples(rows)
    ks = sorted({1, *(k for k in (2, 4, 8, 16, 32, 64) if k <= fewest), *([fewest] if fewest else [])})
    return tuple(solved_in(k) for k in ks)


def num_samples(rows: Iterable[EvalRow]) -> int:
    """That every task has, at least."""
    return min((len(part) for part in samples(rows).values()), default=0)


def samples(rows: Iterable[EvalRow]) -> dict[str, list[EvalRow]]:
    """Task → its rows, without faults."""
    parts: dict[str, list[EvalRow]] = {}
    for row in without_faults(rows):
        parts.setdefault(row.task_id, []).append(row)
    return parts


def shares(rows: Iterable[EvalRow], measure: Measure) -> dict[str, Share] | None:
    """Task → its share; None where a row lacks what the measure reads."""
    parts = samples(rows)
    if any(name not in row.measures for part in parts.values() for row in part for name in measure.needs):
        return None
    return {task: measure.of(part) for task, part in parts.items()}


def figure(rows: Iterable[EvalRow], measure: Measure, *, seed: int = 0) -> Estimate | None:
    """None where the rows do not tell."""
    return _figure(shares(rows, measure), seed)


def _figure(found: Mapping[str, Share] | None, seed: int) -> Estimate | None:
    return estimate(list(found.values()), seed=seed) if found else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One measure of two evaluations."""

    measure: Measure
    before: Estimate | None
    after: Estimate | None
    difference: Difference | None


def compare(
    before: Sequence[EvalRow], after: Sequence[EvalRow], measures: Sequence[Measure], *, seed: int = 0
) -> list[Comparison]:
    """Over the tasks that both have, paired by task. Raises `ValueError` where there is none."""
    sides = samples(before), samples(after)
    common = sides[0].keys() & sides[1].keys()
    if not common:
        raise ValueError("the two evaluations have no task in common: evaluate both on the same tasks")
    old, new = [[row for task in sorted(common) for row in side[task]] for side in sides]
    found = []
    for measure in measures:
        one, other = shares(old, measure), shares(new, measure)
        found.append(
            Comparison(
                measure=measure,
                before=_figure(one, seed),
                after=_figure(other, seed),
                difference=None if one is None or other is None else share_difference(one, other, seed=seed),
            )
        )
    return found


def by_package(before: Sequence[EvalRow], after: Sequence[EvalRow], *, seed: int = 0) -> dict[str, Comparison]:
    """pass@1 of each package's tasks, where both sides have some of them."""
    found = {}
    for name in sorted({row.package for row in before} & {row.package for row in after}):
        old, new = [[row for row in rows if row.package == name] for rows in (before, after)]
        if samples(old).keys() & samples(new).keys():
            found[name] = compare(old, new, [solved_in(1)], seed=seed)[0]
    return found


# --- tables --------------------------------------------------------------------------------------------------


def figures_table(rows: Sequence[EvalRow], measures: Sequence[Measure], heading: str = "") -> list[str]:
    """Lines of plain text: a measure a line, with its 95 % interval."""
    cells = [[heading, "", "95 %"]]
    for measure in measures:
        found = figure(rows, measure)
        cells.append([measure.name, *_estimate_cells(found, measure)])
    return columns(cells)


def comparison_table(found: Mapping[str, Comparison] | Sequence[Comparison], before: str, after: str) -> list[str]:
    """Lines of plain text: a measure (or the name that the mapping gives) a line; both sides, difference and p."""
    named = found if isinstance(found, Mapping) else {one.measure.name: one for one in found}
    cells = [["", "tasks", before, "95 %", after, "95 %", "difference", "95 %", "p"]]
    for name, one in named.items():
        gap, digits = one.difference, _digits(one.measure)
        tasks = [str(gap.num_tasks) if gap else ""]
        difference = (
            [f"{gap.mean:+.{digits}f}", f"{gap.low:+.{digits}f} to {gap.high:+.{digits}f}", _p(gap)]
            if gap
            else ["–", "", ""]
        )
        sides = [*_estimate_cells(one.before, one.measure), *_estimate_cells(one.after, one.measure)]
        cells.append([name, *tasks, *sides, *difference])
    return columns(cells)


def _estimate_cells(found: Estimate | None, measure: Measure) -> list[str]:
    if found is None:
        return ["–", ""]
    digits = _digits(measure)
    return [f"{found.value:.{digits}f}", f"{found.low:.{digits}f}–{found.high:.{digits}f}"]


def _digits(measure: Measure) -> int:
    return 2 if measure.is_count else 3


def _p(gap: Difference) -> str:
    return f"{gap.p_value:.4f}" if gap.p_value >= 0.0001 else "< 0.0001"
