"""The ids of one segment, in the order in which they entered it. Only ever appended to; a divergence forks (law 1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from tidemill.text.tokenizer import common_prefix

SpanKind = Literal["prompt", "sampled", "observation"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Ids `[start, stop)` of a ledger."""

    kind: SpanKind
    start: int
    stop: int


@final
class Ledger:
    """What an engine was asked and what it said. Nothing that was sampled is ever decoded and encoded again."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._spans: list[Span] = []
        self._shared = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    @property
    def shared(self) -> int:
        """How many leading ids belong to the ledger that this one was forked from."""
        return self._shared

    def append(self, kind: SpanKind, ids: Sequence[int]) -> Span:
        """Put ids at the end; returns where they stand."""
        span = Span(kind=kind, start=len(self._ids), stop=len(self._ids) + len(ids))
        self._ids.extend(ids)
        self._spans.append(span)
        return span

    def request(self, received: Sequence[int] = ()) -> list[int]:
        """What an engine is to be asked: everything so far, and what an interrupted generation has brought."""
        return [*self._ids, *received]

    def check_extends(self, prompt_ids: Sequence[int]) -> None:
        """Raises `ValueError` where `prompt_ids` does not begin with every id of this ledger."""
        same = common_prefix(self._ids, prompt_ids)
        if same < len(self._ids):
            kind = next(span.kind for span in self._spans if span.start <= same < span.stop)
            raise ValueError(
                f"the prompt leaves the ledger at position {same} of {len(self._ids)}, inside a {kind} span: fork there"
            )

    def fork(self, position: int) -> "Ledger":
        """A branch that shares the first `position` ids. The sampled ones among them stay this ledger's to train."""
        if not 0 <= position <= len(self._ids):
            raise ValueError(f"cannot fork at {position}: the ledger has {len(self._ids)} ids")
        branch = Ledger()
        branch._ids = self._ids[:position]
        branch._spans = [
            Span(kind=span.kind, start=span.start, stop=min(span.stop, position))
            for span in self._spans
            if span.start < position
        ]
        branch._shared = position
        return branch

    def owned_sampled(self) -> list[int]:
        """Positions that this ledger trains: sampled, and not shared with the one that it was forked from."""
        return [
            position
            for span in self._spans
            if span.kind == "sampled"
            for position in range(max(span.start, self._shared), span.stop)
        ]
