"""Comparisons of evaluations, against answers worked out by hand."""

import pytest

from support.eval_rows import row, rows
from tidemill.reports.comparison import (
    BEHAVIOURS,
    REPAIRS,
    by_package,
    compare,
    comparison_table,
    figure,
    figures_table,
    solved_in,
    solving,
)
from tidemill.reports.resampling import estimate, share_difference

NAMED = {measure.name: measure for measure in (*REPAIRS, *BEHAVIOURS)}
EQUAL = NAMED["of repairs, equal to the original by syntax tree"]


def test_pass_at_k_of_both_sides_and_their_difference() -> None:
    before = rows({"a": [1, 0, 0, 0], "b": [0, 0, 0, 0]})
    after = rows({"a": [1, 1, 0, 0], "b": [0, 0, 0, 1]})
    one, two, four = compare(before, after, solving(before))
    assert one.before and one.after and one.difference
    assert (one.before.value, one.after.value, one.difference.mean) == (0.125, 0.375, 0.25)
    assert two.before and two.before.value == pytest.approx((1 - 3 / 6) / 2), "1 of 4: half of all pairs hold it"
    assert four.after and four.after.value == 1.0
    assert one.difference.p_value == 0.5, "two tasks moved, both up: 2 of the 4 exchanges are as large"
    assert (one.difference.num_better, one.difference.num_worse) == (2, 0)


def test_k_goes_up_to_the_samples_of_every_task() -> None:
    uneven = rows({"a": [0] * 6, "b": [0] * 8})
    assert [measure.name for measure in solving(uneven)] == ["pass@1", "pass@2", "pass@4", "pass@6"]


def test_a_share_of_repairs_counts_repairs_alone() -> None:
    found = [
        row("a", 0, True, ast_equal=1),
        row("a", 1, True, ast_equal=0),
        row("b", 0, True, ast_equal=1),
        row("b", 1, False, ast_equal=0),
        row("c", 0, False, ast_equal=0),
        row("c", 1, False, ast_equal=0),
    ]
    share = figure(found, EQUAL)
    assert share and share.value == pytest.approx(2 / 3)
    assert share.low >= 0.5 and share.high == 1.0, "a resample without b gives 1/2, one without a gives 1"


def test_a_share_of_nothing_is_no_figure() -> None:
    unsolved = rows({"a": [0, 0]}, ast_equal=0)
    assert figure(unsolved, EQUAL) is None
    (one,) = compare(unsolved, rows({"a": [1, 1]}, ast_equal=1), [EQUAL])
    assert one.before is None and one.difference is None and one.after and one.after.value == 1.0


def test_rows_that_do_not_tell_give_no_figure() -> None:
    (one,) = compare(rows({"a": [1]}), rows({"a": [1]}, first_edit_correct=1), [REPAIRS[0]])
    assert one.before is None and one.difference is None and one.after is not None


def test_only_common_tasks_are_compared_and_faults_count_nowhere() -> None:
    before = [*rows({"a": [1], "b": [1]}), row("c", 0, False, "env_fault")]
    after = [*rows({"a": [0], "c": [0]}), row("a", 1, False, "env_fault")]
    (one,) = compare(before, after, [solved_in(1)])
    assert one.difference and (one.difference.num_tasks, one.difference.mean) == (1, -1.0)
    with pytest.raises(ValueError, match="no task in common"):
        compare(before, rows({"z": [1]}), [solved_in(1)])


def test_more_samples_of_a_task_give_it_no_more_weight() -> None:
    share = figure([*rows({"a": [1] * 9}), *rows({"b": [0]})], solved_in(1))
    assert share and share.value == 0.5


def test_an_interval_by_hand() -> None:
    """Two tasks, 0 and 1: the mean of two draws is 0, ½ or 1 with odds 1 : 2 : 1."""
    found = estimate([(0.0, 1.0), (1.0, 1.0)], level=0.4)
    assert found and (found.value, found.low, found.high) == (0.5, 0.5, 0.5)
    found = estimate([(0.0, 1.0), (1.0, 1.0)], level=0.9)
    assert found and (found.low, found.high) == (0.0, 1.0)


def test_an_exchange_moves_numerator_and_denominator_together() -> None:
    """Task a: 1 of 1 before, 0 of 1 after; b the same. Exchanged in one of them, both sides are 1 of 2."""
    found = share_difference({"a": (1.0, 1.0), "b": (1.0, 1.0)}, {"a": (0.0, 1.0), "b": (0.0, 1.0)})
    assert found and (found.mean, found.p_value) == (-1.0, 0.5)


def test_packages_are_told_apart() -> None:
    before = [row("a", 0, False, package="toolz"), row("b", 0, True, package="boltons")]
    after = [row("a", 0, True, package="toolz"), row("b", 0, True, package="boltons"), row("c", 0, True, package="x")]
    found = by_package(before, after)
    assert list(found) == ["boltons", "toolz"]
    gap = found["toolz"].difference
    assert gap and gap.mean == 1.0


def test_tables_are_lines_with_all_figures() -> None:
    before, after = rows({"a": [0, 0], "b": [1, 0]}, num_tests=1), rows({"a": [1, 0], "b": [1, 0]}, num_tests=3)
    lines = comparison_table(compare(before, after, [solved_in(1), NAMED["tests"], EQUAL]), "version 0", "version 9")
    assert lines[0].split()[:3] == ["tasks", "version", "0"]
    expected = "pass@1 2 0.250 0.000–0.500 0.500 0.500–0.500 +0.250 +0.000 to +0.500 1.0000"
    assert " ".join(lines[1].split()) == expected
    assert lines[2].split()[:4] == ["tests", "2", "1.00", "1.00–1.00"]
    assert "–" in lines[3]
    assert figures_table(before, [solved_in(1)])[1].split() == ["pass@1", "0.250", "0.000–0.500"]
