"""Edits that lead from one text to another."""

from hypothesis import given
from hypothesis import strategies as st

from tidemill.text.windows import edits_between


def test_lines_around_an_empty_one_are_edited_each_for_itself() -> None:
    """One edit over all of them would pass through texts that are no Python."""
    assert edits_between("a = 1\n\n\nb = 2\n", "a = 3\n\n\nb = 4\n") == [(4, "2", "4"), (1, "1", "3")]


TEXTS = st.lists(st.sampled_from(["", "a = 1", "b = a", "    c", "d"]), min_size=1, max_size=6).map("\n".join)


@given(TEXTS, TEXTS)
def test_edits_lead_there_but_for_lines_that_go(before: str, after: str) -> None:
    try:
        edits = edits_between(before, after)
    except ValueError:
        return
    lines = before.split("\n")
    for line, old, new in edits:
        assert old in lines[line - 1]
        lines[line - 1] = lines[line - 1].replace(old, new, 1)
    found = "\n".join(lines)
    assert found == after or [line for line in found.split("\n") if line] == [
        line for line in after.split("\n") if line
    ]
