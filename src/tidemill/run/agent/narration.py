"""The turns of an episode, told while they are played. What is told may have been written by the policy, or by code
that it ran: it is made printable."""

from collections.abc import Callable, Sequence
from typing import final

from tidemill.core.grammar import Grammar
from tidemill.core.records import Observation, Outcome, Task, ToolCall
from tidemill.core.seams import Environment, Feedback, Pointing, Renderer, Score, Spans, ToolSpec, Turn
from tidemill.text.terminal import printable

Say = Callable[[str], None]
MAX_LINES = 12
"""Of one result."""


@final
class NarratedEnvironment:
    """`core.seams.Environment` around another, that says what is called and what it brings."""

    def __init__(self, inner: Environment, say: Say) -> None:
        self._inner = inner
        self._say = say

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return self._inner.tools

    @property
    def reward_version(self) -> str:
        return self._inner.reward_version

    async def open(self, task: Task) -> str:
        return await self._inner.open(task)

    def spans(self) -> Spans | None:
        return self._inner.spans() if isinstance(self._inner, Pointing) else None

    async def call(self, call: ToolCall) -> Feedback:
        self._say(f"  {called(call)}")
        feedback = await self._inner.call(call)
        for line in shortened(feedback.text):
            self._say(f"      {line}")
        return feedback

    async def score(self, outcome: Outcome) -> Score:
        return await self._inner.score(outcome)

    async def close(self) -> None:
        await self._inner.close()


@final
class NarratedRenderer:
    """`core.seams.Renderer` around another, that says which calls could not be read."""

    def __init__(self, inner: Renderer, say: Say) -> None:
        self._inner = inner
        self._say = say
        self.name = inner.name
        self.stop_ids = inner.stop_ids

    @property
    def glossary(self) -> tuple[str, ...]:
        return self._inner.glossary

    def open(self, tools: Sequence[ToolSpec], text: str) -> list[int]:
        return self._inner.open(tools, text)

    def observe(self, observations: Sequence[Observation], max_tokens: int) -> list[int]:
        return self._inner.observe(observations, max_tokens)

    def say(self, calls: Sequence[ToolCall]) -> list[int]:
        return self._inner.say(calls)

    def grammar(self, tools: Sequence[ToolSpec], spans: Spans | None) -> Grammar | None:
        return self._inner.grammar(tools, spans)

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec], turn: int) -> Turn:
        parsed = self._inner.parse(token_ids, tools, turn)
        for error in parsed.errors:
            text = " ".join(printable(parsed.text).split())
            self._say(f"  {text[:60]}{'...' if len(text) > 60 else ''}")
            self._say(f"      no call: {printable(error.text)}")
        return parsed

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._inner.decode(token_ids)


def called(call: ToolCall) -> str:
    """A call on one line: `edit 3 '> low' -> '< low'`, `read 12`, `test`."""
    values = list(call.arguments.values())
    if call.name == "edit" and len(values) == 3:
        return f"edit {values[0]} {str(values[1])!r} -> {str(values[2])!r}"
    return " ".join(
        [printable(call.name), *(str(value) if isinstance(value, int) else repr(value) for value in values)]
    )


def shortened(text: str) -> list[str]:
    lines = printable(text).split("\n") if text else []
    return lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], f"... {len(lines) - MAX_LINES + 1} more"]
