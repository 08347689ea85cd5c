"""Charts: ticks that cover, scales that place, and text that is escaped."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidemill.reports.charts import (
    HEIGHT,
    WIDTH,
    Lane,
    Series,
    bars,
    line_chart,
    moving_average,
    number,
    ticks,
    timeline,
)

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(finite, finite)
@example(0.0, 5e-324)
@example(0.0, 1e-13)
@example(1e6, 1e6 + 1e-7)
def test_ticks_cover_the_range_in_even_steps(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    found = ticks(low, high)
    step = found[1] - found[0]
    slack = 1e-6 * max(abs(low), abs(high))
    assert found[0] <= low + slack
    assert found[-1] >= high - slack
    assert 2 <= len(found) <= 8
    assert all(found[i + 1] - found[i] == pytest.approx(step, rel=1e-2) for i in range(len(found) - 1))


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=40))
def test_everything_is_drawn_inside_of_the_chart(points: list[tuple[float, float]]) -> None:
    svg = line_chart([Series(label="x", points=tuple(sorted(points)), dots=True)], x_label="update")
    for x, y in re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', svg):
        assert -0.1 <= float(x) <= WIDTH + 0.1
        assert -0.1 <= float(y) <= HEIGHT + 0.1


def test_numbers_are_short() -> None:
    found = [number(value) for value in (0, 0.5, 1234.5, 123_456, 2e-4, -0.125)]
    assert found == ["0", "0.5", "1234", "123k", "2e-4", "-0.125"]


def test_a_moving_average_keeps_a_constant_and_the_ends() -> None:
    assert moving_average([(float(i), 2.0) for i in range(9)], 5) == [(float(i), 2.0) for i in range(9)]
    assert moving_average([(0.0, 0.0), (1.0, 3.0), (2.0, 6.0)], 3)[1] == (1.0, 3.0)


def test_labels_are_escaped() -> None:
    assert "<b>" not in line_chart([Series(label="<b>", points=((0, 1), (1, 2)), dots=True)], x_label="<b>")
    assert "<b>" not in bars([("<b>", 1.0, "<b>")])
    assert "<b>" not in timeline([Lane(label="<b>", spans=((0, 1, "work"),))], 1.0, [])


def test_an_empty_chart_says_so() -> None:
    assert "nothing yet" in line_chart([Series(label="x", points=())], x_label="update")
    assert "nothing yet" in bars([])


def test_a_long_timeline_stays_small() -> None:
    spans = tuple((i * 0.001, i * 0.001 + 0.0005, "work") for i in range(50_000))
    svg = timeline([Lane(label="worker-0", spans=spans)], 50.0, [(0.0, 0.0), (50.0, 40.0)])
    assert svg.count('class="span work"') < 1000
