"""The compact grammar, the default renderer of small models: no JSON, no names of arguments, six special tokens.

    <|task|> text <|call|> edit<|arg|>12<|arg|>old<|arg|>new<|end|> <|obs|> text <|call|> submit<|end|>

The policy samples from behind `<|call|>` to `<|end|>`, the stop token: one call per turn, arguments in the order of the
tool's parameters. Tools are not described: a policy of this size learns them from demonstrations. Long names are single
tokens (`text.glossary`).
"""

from collections.abc import Sequence
from typing import final

from tidemill.core.grammar import Grammar
from tidemill.core.records import Observation, ToolCall
from tidemill.core.seams import Spans, ToolSpec, Turn
from tidemill.text.call_grammar import call_grammar
from tidemill.text.calls import fault, positional_call, without_duplicates
from tidemill.text.glossary import Glossary
from tidemill.text.tokenizer import ARG, CALL, END, OBS, TASK, Tokenizer

CUT_MARK = "\n...\n"


@final
class CompactRenderer:
    """`core.seams.Renderer` over a `Tokenizer`, for one episode: it remembers the names of the text that it opened."""

    name = "compact-2"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._task, self._obs = tokenizer.special(TASK), tokenizer.special(OBS)
        self._call, self._arg = tokenizer.special(CALL), tokenizer.special(ARG)
        self._end = tokenizer.special(END)
        self._mark = tokenizer.encode(CUT_MARK)
        self._glossary = Glossary(tokenizer)
        self._grammar: tuple[object, Grammar] | None = None
        self.stop_ids = [self._end]

    @property
    def glossary(self) -> tuple[str, ...]:
        return self._glossary.words

    def open(self, tools: Sequence[ToolSpec], text: str) -> list[int]:
        self._glossary = Glossary.of(self._tokenizer, text)
        self._grammar = None
        return [self._task, *self._glossary.encode(text), self._call]

    def observe(self, observations: Sequence[Observation], max_tokens: int) -> list[int]:
        """Each text has at most `max_tokens` ids: a longer one is cut in the middle, with a marker."""
        ids: list[int] = []
        for observation in observations:
            ids += [self._obs, *self._cut(self._glossary.encode(observation.text), max_tokens)]
        return [*ids, self._call]

    def say(self, calls: Sequence[ToolCall]) -> list[int]:
        """Raises `ValueError` for any number of calls but one: the grammar has no word for it."""
        if len(calls) != 1:
            raise ValueError(f"the compact grammar says one call per turn, not {len(calls)}")
        ids = self._glossary.encode(calls[0].name)
        for value in calls[0].arguments.values():
            ids += [self._arg, *self._glossary.encode(str(value))]
        return [*ids, self._end]

    def grammar(self, tools: Sequence[ToolSpec], spans: Spans | None) -> Grammar:
        key = None if spans is None else (spans.tool, *spans.lines.items())
        if self._grammar is None or self._grammar[0] != key:
            self._grammar = key, self._calls(tools, spans)
        return self._grammar[1]

    def _calls(self, tools: Sequence[ToolSpec], spans: Spans | None) -> Grammar:
        encode = self._glossary.encode
        lines = {} if spans is None else spans.lines
        return call_grammar(
            [(encode(tool.name), bool(tool.parameters), bool(tool.required)) for tool in tools],
            [] if spans is None else encode(spans.tool),
            {number: (encode(str(number)), encode(text)) for number, text in lines.items()},
            arg_id=self._arg,
            end_id=self._end,
        )

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec], turn: int) -> Turn:
        result = self._parse(token_ids, tools, f"call-{turn}")
        calls, errors = without_duplicates([result])
        return Turn(text=self.decode(token_ids), calls=calls, errors=errors)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._glossary.decode(token_ids)

    def _parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec], call_id: str) -> ToolCall | Observation:
        if not token_ids:
            return fault(call_id, "empty", "nothing was said")
        if token_ids[-1] != self._end:
            return fault(call_id, "truncated", "the call does not end: say less")
        fields: list[list[int]] = [[]]
        for id_ in token_ids[:-1]:
            if id_ == self._arg:
                fields.append([])
            elif id_ in self._tokenizer.special_ids:
                return fault(call_id, "malformed", "a call holds a name, arguments and an end, no other mark")
            else:
                fields[-1].append(id_)
        values = []
        for ids in fields:
            try:
                values.append(self._glossary.decode_bytes(ids).decode("utf-8"))
            except ValueError:  # UnicodeDecodeError is one
                return fault(call_id, "malformed", "the call is no text")
        return positional_call(call_id, values[0], values[1:], tools)

    def _cut(self, ids: list[int], max_tokens: int) -> list[int]:
        if len(ids) <= max_tokens:
            return ids
        kept = max_tokens - len(self._mark)
        if kept < 2:
            return ids[: max(0, max_tokens)]
        head = kept // 2
        return [*ids[:head], *self._mark, *ids[len(ids) - (kept - head) :]]
