"""Canonical text of a result: equal for equal results whatever their order in memory, different for others."""

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.checks import canonical_source

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), st.text(max_size=4), st.binary(max_size=3), st.floats(width=16)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        st.sets(st.text(max_size=3), max_size=4),
    ),
    max_leaves=8,
)


def canonical() -> Callable[[object], str]:
    names: dict[str, Any] = {}
    exec(canonical_source(), names)
    return names["canonical"]


def turned(value: Any) -> Any:
    """The same value, its sets and dictionaries filled in the opposite order."""
    if type(value) is dict:
        return {key: turned(value[key]) for key in reversed(list(value))}
    if type(value) is set:
        return set(reversed(list(value)))
    if type(value) in (list, tuple):
        return type(value)(turned(item) for item in value)
    return value


@given(values)
def test_order_in_memory_does_not_show(value: Any) -> None:
    text = canonical()
    assert text(turned(value)) == text(value)


@given(st.lists(scalars, max_size=4), st.lists(scalars, max_size=4))
def test_different_results_have_different_texts(one: list[Any], other: list[Any]) -> None:
    text = canonical()
    same = [(type(item), repr(item)) for item in one] == [(type(item), repr(item)) for item in other]
    assert (text(one) == text(other)) is same
    assert text(one) != text(tuple(one)) != text(iter(one)) != text(one)


@given(st.lists(st.integers(), max_size=5))
def test_an_iterator_is_drained_and_its_failure_is_part_of_it(items: list[int]) -> None:
    def failing() -> Any:
        yield from items
        raise KeyError("end")

    text = canonical()
    inside = text(items)[1:-1]
    assert text(iter(items)) == f"iter[{inside}]"
    assert text(failing()) == f"iter[{inside}{', ' if items else ''}raise KeyError('end')]"
