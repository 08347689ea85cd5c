"""Malformed calls become errors that name what was wrong; nothing runs with empty or guessed arguments."""

import pytest

from tidemill.core.records import Observation, ToolCall
from tidemill.core.seams import ToolSpec
from tidemill.text.calls import named_call, positional_call, without_duplicates
from tidemill.text.compact import CompactRenderer
from tidemill.text.tokenizer import ARG, END, OBS, Tokenizer

TOOLS = (
    ToolSpec(
        name="edit",
        description="",
        parameters={"line": "integer", "old": "string", "new": "string"},
        required=("line", "old", "new"),
    ),
    ToolSpec(name="read", description="", parameters={"start": "integer"}, required=()),
)


@pytest.mark.parametrize(
    ("name", "values", "kind", "says"),
    [
        ("", [], "empty", "no tool"),
        ("erase", [], "unknown_tool", "edit, read"),
        ("Edit", ["1", "a", "b"], "unknown_tool", "edit, read"),
        ("edit", [], "bad_arguments", "line, old, new"),
        ("edit", ["1", "a"], "bad_arguments", "new"),
        ("edit", ["1", "a", "b", "c"], "bad_arguments", "at most 3"),
        ("edit", ["one", "a", "b"], "bad_arguments", "integer"),
        ("edit", ["", "a", "b"], "bad_arguments", "integer"),
        ("edit", [" 1", "a", "b"], "bad_arguments", "integer"),
        ("edit", ["1_0", "a", "b"], "bad_arguments", "integer"),
        ("edit", ["١", "a", "b"], "bad_arguments", "integer"),
        ("read", ["9" * 400], "bad_arguments", "integer"),
    ],
)
def test_positional_faults(name: str, values: list[str], kind: str, says: str) -> None:
    result = positional_call("call-7", name, values, TOOLS)
    assert isinstance(result, Observation)
    assert (result.error, result.call_id) == (kind, "call-7")
    assert says in result.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([("lines", 1)], "no argument"),
        ([("line", 1), ("line", 2), ("old", "a"), ("new", "b")], "twice"),
        ([("line", True), ("old", "a"), ("new", "b")], "integer"),
        ([("line", 1), ("old", 5), ("new", "b")], "text"),
    ],
)
def test_named_faults(arguments: list[tuple[str, str | int]], says: str) -> None:
    result = named_call("c", "edit", arguments, TOOLS)
    assert isinstance(result, Observation) and result.error == "bad_arguments"
    assert says in result.text


def test_optional_arguments_may_be_left_out() -> None:
    result = positional_call("c", "read", [], TOOLS)
    assert isinstance(result, ToolCall) and result.arguments == {}


def test_a_repeated_call_id_is_an_error() -> None:
    call = ToolCall(id="c", name="read", arguments={})
    calls, errors = without_duplicates([call, call])
    assert len(calls) == 1 and errors[0].error == "duplicate"


def test_compact_faults() -> None:
    tokenizer = Tokenizer.train(["edit read"], 464)
    renderer = CompactRenderer(tokenizer)
    arg, end, obs = tokenizer.special(ARG), tokenizer.special(END), tokenizer.special(OBS)
    name = tokenizer.encode("read")
    broken = [id_ for id_ in range(tokenizer.vocab_size) if tokenizer.decode_bytes([id_]) == b"\xff"]
    cases = {
        "empty": [[], [end]],
        "truncated": [name, [*name, arg]],
        "malformed": [[*name, obs, end], [*name, end, end], [*name, arg, *broken, end]],
        "bad_arguments": [[*name, arg, end]],
    }
    for kind, sampled in cases.items():
        for ids in sampled:
            turn = renderer.parse(ids, TOOLS, 4)
            assert [error.error for error in turn.errors] == [kind], ids
            assert turn.errors[0].call_id == "call-4" and not turn.calls


def test_several_calls_cannot_be_said_in_the_compact_grammar() -> None:
    renderer = CompactRenderer(Tokenizer.train(["edit read"], 464))
    with pytest.raises(ValueError, match="one call per turn"):
        renderer.say([])
