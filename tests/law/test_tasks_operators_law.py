"""A mutation changes one span, parses, gives another syntax tree, and its inverse gives the source back."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.errors import TaskError
from tidemill.core.records import encode
from tidemill.tasks.operators import apply, inverse, sites
from tidemill.tasks.spans import functions, same_tree

names = st.sampled_from(["a", "b", "c", "xs", "größe"])
atoms = st.one_of(names, st.integers(0, 20).map(str), st.sampled_from(["True", "False", "None", "'é#'", 'f"{a!r}"']))


def expressions() -> st.SearchStrategy[str]:
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from([" + ", "-", " // ", " % ", "**", " and ", " or "]), inner).map("".join),
            st.tuples(inner, st.sampled_from([" < ", ">=", " is not ", " not  in ", " == "]), inner).map(
                lambda parts: f"({parts[0]}){parts[1]}({parts[2]})"
            ),
            st.tuples(st.sampled_from(["min", "xs.lower", "f"]), inner, inner).map(
                lambda parts: f"{parts[0]}({parts[1]}, {parts[2]})"
            ),
            inner.map(lambda text: f"not {text}"),
            inner.map(lambda text: f"xs[{text}:]"),
            st.tuples(inner, inner, inner).map(lambda parts: f"({parts[0]} if {parts[1]} else {parts[2]})"),
        ),
        max_leaves=6,
    )


@st.composite
def sources(draw: st.DrawFn) -> str:
    body = []
    for _ in range(draw(st.integers(1, 4))):
        text = draw(expressions())
        form = draw(
            st.sampled_from(["{n} = {e}", "if {e}:\n{i}    {n} += 1", "while {e}:\n{i}    break", "{e}  # {n}"])
        )
        body.append(form.format(n=draw(names), e=text, i="    "))
    indented = "\n".join("    " + line for line in body)
    code = f"def g(a, b=1, *xs):\n    '''é {{doc}}'''\n{indented}\n    return {draw(names)}\n"
    try:
        ast.parse(code)
    except SyntaxError:
        code = "def g(a, b):\n    return a < b\n"
    if draw(st.booleans()):
        code = "class K:\n" + "".join("    " + line for line in code.splitlines(keepends=True))
    return "# größer\x0c\n" + code + "\nx = 1\n"


@given(sources())
def test_mutations_are_local_and_can_be_undone(source: str) -> None:
    for mutation in sites(source):
        mutant = apply(source, mutation)
        assert mutant[: mutation.start] == source[: mutation.start]
        assert mutant[mutation.start + len(mutation.new) :] == source[mutation.end :]
        assert mutation.line == source[: mutation.start].count("\n") + 1
        assert not same_tree(source, mutant)
        assert apply(mutant, inverse(mutation)) == source


@given(sources())
def test_a_function_is_its_own_lines(source: str) -> None:
    for span in functions(source):
        assert source[span.start : span.end].lstrip().startswith("def g")
        found = [[encode(item) for item in sites(source, name)] for name in (span.qualname, None)]
        assert found[0] == found[1]


def test_a_mutation_of_another_source_is_refused() -> None:
    source = "def f(a, b):\n    return a < b\n"
    mutation = sites(source)[0]
    with pytest.raises(TaskError, match="another source"):
        apply("# moved\n" + source, mutation)
