"""Laws of text: nothing is lost between text and ids, text cannot forge structure, parsing never raises."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.records import Observation, ToolCall
from tidemill.core.seams import ToolSpec
from tidemill.text.compact import CompactRenderer
from tidemill.text.ledger import Ledger
from tidemill.text.tokenizer import SPECIAL_TOKENS, Tokenizer, pieces
from tidemill.text.windows import line_edit

TOOLS = (
    ToolSpec(name="edit", description="", parameters={"line": "integer", "old": "string"}, required=("line", "old")),
    ToolSpec(name="read", description="", parameters={"start": "integer"}, required=()),
    ToolSpec(name="submit", description="", parameters={}, required=()),
)
any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=60) | st.lists(
    st.sampled_from([*SPECIAL_TOKENS, "    ", "if x", "12|", " == ", "\n", "🙂", "é", "\ud800", "7"]), max_size=12
).map("".join)
clean_text = any_text.map(lambda text: text.encode("utf-8", "replace").decode())
code_line = st.lists(
    st.sampled_from(
        ["    ", "if ", "x", " < ", " <= ", "foo", "(", ")", ", ", "x", " + ", "1", "12", " and ", ":", "\n"]
    ),
    max_size=14,
).map("".join)


@cache
def tokenizer() -> Tokenizer:
    texts = [f"{number}|    if x{number} <= len(self.foo) and not done:\n" * 3 for number in range(40)]
    return Tokenizer.train(texts, 464)


@given(any_text)
def test_text_round_trips_and_never_yields_special_tokens(text: str) -> None:
    ids = tokenizer().encode(text)
    assert tokenizer().decode_bytes(ids) == text.encode("utf-8", "surrogatepass")
    assert not set(ids) & tokenizer().special_ids


@given(st.lists(st.integers(0, 365), max_size=40))
def test_sampled_ids_decode_losslessly_even_where_they_are_no_text(ids: list[int]) -> None:
    whole = tokenizer().decode_bytes(ids)
    assert whole == b"".join(tokenizer().decode_bytes([id_]) for id_ in ids)
    assert tokenizer().decode(ids).encode().decode() == whole.decode("utf-8", "replace")


@given(any_text)
def test_pieces_leave_nothing_out_and_tokens_stay_inside_them(text: str) -> None:
    assert "".join(pieces(text)) == text


@given(st.lists(st.integers(-1, 501), max_size=30))
def test_parsing_never_raises_and_yields_a_call_or_an_error(ids: list[int]) -> None:
    turn = CompactRenderer(tokenizer()).parse(ids, TOOLS, 0)
    assert len(turn.calls) + len(turn.errors) == 1
    for call in turn.calls:
        spec = next(tool for tool in TOOLS if tool.name == call.name)
        assert set(spec.required) <= set(call.arguments)


@given(st.integers(-(10**9) + 1, 10**9 - 1), clean_text)
def test_what_is_said_is_what_is_parsed(line: int, old: str) -> None:
    renderer = CompactRenderer(tokenizer())
    call = ToolCall(id="call-3", name="edit", arguments={"line": line, "old": old})
    turn = renderer.parse(renderer.say([call]), TOOLS, 3)
    assert not turn.errors
    assert turn.calls[0].arguments == call.arguments and turn.calls[0].id == "call-3"


@given(any_text, st.integers(0, 40))
def test_observations_keep_within_their_tokens(text: str, max_tokens: int) -> None:
    renderer = CompactRenderer(tokenizer())
    ids = renderer.observe([Observation(call_id="c", text=text)], max_tokens)
    whole = tokenizer().encode(text)
    assert len(ids) <= max_tokens + 2
    if len(whole) <= max_tokens:
        assert ids[1:-1] == whole
    elif max_tokens > 20:
        assert ids[1] == whole[0] and ids[-2] == whole[-1]


@given(code_line, code_line)
def test_a_line_edit_leads_from_one_line_to_the_other(before: str, after: str) -> None:
    if before == after or not before:
        with pytest.raises(ValueError, match="no edit leads"):
            line_edit(before, after)
        return
    old, new = line_edit(before, after)
    assert old
    assert before.replace(old, new, 1) == after


@given(st.lists(st.tuples(st.sampled_from(["prompt", "sampled"]), st.lists(st.integers(0, 9), max_size=5))), st.data())
def test_a_ledger_owns_each_sampled_token_once_over_its_forks(
    parts: list[tuple[str, list[int]]], data: st.DataObject
) -> None:
    ledger = Ledger()
    for kind, ids in parts:
        ledger.append(kind, ids)  # type: ignore[arg-type]
    sampled = sum(len(ids) for kind, ids in parts if kind == "sampled")
    position = data.draw(st.integers(0, len(ledger)))
    branch = ledger.fork(position)
    branch.append("sampled", [1, 2])
    assert branch.ids[:position] == ledger.ids[:position]
    assert len(ledger.owned_sampled()) == sampled
    assert branch.owned_sampled() == [position, position + 1]
    ledger.check_extends(ledger.request([5]))
    if len(ledger):
        other = [*ledger.ids[:-1], ledger.ids[-1] + 1]
        with pytest.raises(ValueError, match="leaves the ledger"):
            ledger.check_extends(other)
