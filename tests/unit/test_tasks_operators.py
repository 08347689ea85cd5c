"""Each operator finds its place, and changes what its name says."""

import pytest

from tidemill.core.errors import TaskError
from tidemill.tasks.operators import apply, sites

CASES = {
    "comparison": ("return a < b", "return a <= b"),
    "arithmetic": ("return a + b", "return a - b"),
    "boolean": ("return a and b", "return a or b"),
    "dropped_not": ("return not a", "return a"),
    "negated_condition": ("return 1 if a else b", "return 1 if not a else b"),
    "constant": ("return a[1]", "return a[2]"),
    "boolean_constant": ("return True", "return False"),
    "wrong_name": ("return a.x", "return b.x"),
    "wrong_return": ("return a", "return b"),
    "swapped_call": ("return min(a)", "return max(a)"),
    "swapped_arguments": ("return f(a, b)", "return f(b, a)"),
    "off_by_one": ("return x[a:b]", "return x[a + 1:b]"),
    "swapped_slice": ("return x[a:]", "return x[:a]"),
    "loop_exit": ("for a in b: break", "for a in b: continue"),
    "swapped_branches": ("return a if x else b", "return b if x else a"),
    "removed_line": ("a = 1\n    b = 2", "b = 2"),
}


@pytest.mark.parametrize("operator", sorted(CASES))
def test_operator(operator: str) -> None:
    before, after = (f"def f(a, b):\n    {text}\n" for text in CASES[operator])
    mutants = {apply(before, item) for item in sites(before, "f") if item.operator == operator}
    assert after in mutants


def test_annotations_docstrings_and_decorators_are_left_alone() -> None:
    source = '@g(1 < 2)\ndef f(a: "1 < 2" = None) -> 1 + 2:\n    """1 < 2"""\n'
    assert sites(source) == []


def test_an_operator_inside_a_comment_is_not_mistaken() -> None:
    source = "def f(a, b):\n    return (a # < not this\n            < b)\n"
    assert not [item for item in sites(source) if item.operator == "comparison"]


def test_unknown_function_and_broken_source_are_refused() -> None:
    with pytest.raises(TaskError, match="no function 'g'"):
        sites("def f(): pass\n", "g")
    with pytest.raises(TaskError, match="cannot be parsed"):
        sites("def f(:\n")
