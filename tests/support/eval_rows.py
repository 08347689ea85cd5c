"""Rows of evaluations, as short as tests like to write them."""

from typing import Any

from tidemill.core.records import Outcome
from tidemill.reports.evaluation import EvalRow


def row(task: str, sample: int, solved: bool, outcome: Outcome = "submitted", **other: Any) -> EvalRow:
    """`other`: fields of the row; names that it does not have are measures."""
    values: dict[str, Any] = {"version": 0, "reward": float(solved), "sampled_tokens": 10, "total_tokens": 50}
    values |= {"turns": 2, "episode": "e" * 64}
    fields = set(EvalRow.__struct_fields__)
    measures = {name: float(value) for name, value in other.items() if name not in fields}
    values |= {name: value for name, value in other.items() if name in fields}
    return EvalRow(task_id=task, sample=sample, solved=solved, outcome=outcome, measures=measures, **values)


def rows(rates: dict[str, list[int]], **other: Any) -> list[EvalRow]:
    """Task → 1 or 0 per sample."""
    return [row(task, n, bool(hit), **other) for task, hits in rates.items() for n, hit in enumerate(hits)]
