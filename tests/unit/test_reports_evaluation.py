"""Statistics of evaluations, against values worked out by hand or by enumeration."""

import itertools
import json
from pathlib import Path

import msgspec
import pytest

from support.eval_rows import row
from tidemill.reports.evaluation import (
    by_key,
    pass_at_k,
    read_rows,
    solve_rates,
    summarize,
    table,
)
from tidemill.reports.resampling import bootstrap_interval, paired_difference


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_solution() -> None:
    for n, c, k in [(5, 2, 1), (5, 2, 3), (6, 0, 2), (6, 6, 2), (7, 3, 7)]:
        samples = [True] * c + [False] * (n - c)
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="at least k times"):
        pass_at_k(2, 1, 3)


def test_pass_at_1_weighs_tasks_not_samples() -> None:
    rows = [row("a", i, True) for i in range(8)] + [row("b", i, False) for i in range(2)]
    summary = summarize(rows)
    assert summary.pass_1 == 0.5
    assert summary.num_tasks == 2
    assert summary.best_of == {1: 0.5, 2: 0.5}


def test_bootstrap_interval_of_a_fair_coin_is_the_binomial_one() -> None:
    low, high = bootstrap_interval([0.0, 1.0] * 50, seed=1)
    assert low == pytest.approx(0.40, abs=0.011)
    assert high == pytest.approx(0.60, abs=0.011)
    assert bootstrap_interval([0.0, 1.0] * 50, seed=1) == (low, high)


def test_bootstrap_interval_of_equal_values_is_a_point() -> None:
    assert bootstrap_interval([0.25] * 7) == (0.25, 0.25)


def test_sign_flip_p_value_by_hand() -> None:
    before = dict.fromkeys("abcde", 0.0)
    gain = paired_difference(before, dict.fromkeys("abcde", 1.0))
    assert gain.p_value == 2 / 2**5  # all signs plus, or all minus
    assert (gain.mean, gain.num_better, gain.num_worse) == (1.0, 5, 0)
    none = paired_difference(before, before)
    assert (none.p_value, none.mean) == (1.0, 0.0)


def test_sign_flip_by_sampling_agrees_with_the_exact_test() -> None:
    before = {str(i): 0.0 for i in range(12)}
    after = {str(i): 1.0 if i < 9 else -1.0 for i in range(12)}
    exact = paired_difference(before, after, num_resamples=5000).p_value
    sampled = paired_difference(before, after, num_resamples=4000).p_value
    assert exact == pytest.approx(2 * (1 + 12 + 66 + 220) / 2**12)
    assert sampled == pytest.approx(exact, abs=0.03)


def test_a_difference_is_over_common_tasks() -> None:
    assert paired_difference({"a": 0.0, "b": 1.0}, {"a": 1.0, "c": 0.0}).num_tasks == 1
    with pytest.raises(ValueError, match="no task in common"):
        paired_difference({"a": 0.0}, {"b": 0.0})


def test_rows_are_read_once_and_a_cut_off_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    assert read_rows(path) == []
    line = msgspec.json.encode(row("a", 0, True)) + b"\n"
    path.write_bytes(line + line + msgspec.json.encode(row("a", 1, False))[:20])
    assert [r.sample for r in read_rows(path)] == [0]
    path.write_bytes(b"{}\n" + line)
    with pytest.raises(ValueError, match="line 1"):
        read_rows(path)


def test_a_fault_that_was_tried_again_gives_way_and_one_that_stands_counts_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    tries = [row("a", 0, False, "env_fault"), row("a", 0, True), row("b", 0, False, "env_fault")]
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in tries))
    found = read_rows(path)
    assert [(one.task_id, one.outcome) for one in found] == [("a", "submitted"), ("b", "env_fault")]
    summary = summarize(found)
    assert (summary.num_tasks, summary.pass_1) == (1, 1.0)
    assert summary.outcomes == {"env_fault": 1, "submitted": 1}
    with pytest.raises(ValueError, match="no rows"):
        summarize(found[1:])


def test_tables_by_package() -> None:
    rows = [row("a", 0, True, package="toolz"), row("b", 0, False, package="boltons", outcome="step_limit")]
    parts = by_key(rows, lambda r: r.package)
    assert list(parts) == ["toolz", "boltons"]
    assert parts["boltons"].outcomes == {"step_limit": 1}
    lines = table(parts, "package")
    assert lines[0].split()[:3] == ["package", "tasks", "pass@1"]
    assert lines[1].split()[2] == "1.000"
    assert solve_rates(rows) == {"a": 1.0, "b": 0.0}
    assert json.loads(msgspec.json.encode(rows[0]))["solved"] is True
