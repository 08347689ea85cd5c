"""A mutation changes one span, parses, gives another syntax tree, and its inverse gives the source back."""

import ast
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.errors import TaskError
from tidemill.core.records import encode
from tidemill.tasks.inverse import UNGUESSABLE, inverses
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


@settings(max_examples=10, deadline=None)
@given(sources(), st.randoms(use_true_random=False))
def test_what_a_fault_can_have_been_is_all_found_and_nothing_else(source: str, rng: random.Random) -> None:
    faults = [fault for fault in sites(source) if fault.operator not in UNGUESSABLE]
    (span,) = functions(source)
    for fault in rng.sample(faults, min(2, len(faults))):
        faulty = apply(source, fault)
        found = inverses(faulty, span.start_line, span.end_line)
        assert source in found
        assert len(set(found)) == len(found) and faulty not in found
        for version in rng.sample(found, min(5, len(found))):
            assert faulty in [apply(version, back) for back in sites(version)]


def test_guesses_stay_inside_the_window() -> None:
    source = "def f(a):\n    return a < 1\n\n\ndef g(b):\n    return b < 2\n"
    found = inverses(source, 1, 2)
    assert "def f(a):\n    return a <= 1\n\n\ndef g(b):\n    return b < 2\n" in found
    assert all(version.endswith("def g(b):\n    return b < 2\n") for version in found)


def test_half_a_function_can_be_guessed_at_too() -> None:
    source = "def f(a):\n    if a:\n        return a < 1\n    return a\n"
    found = inverses(source, 3, 4)
    assert source.replace("a < 1", "a <= 1") in found and all(version[:20] == source[:20] for version in found)


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
