"""From the chunks of one or more streams to one `Generation`, exactly. What is missing raises; it is never filled in.

A generation that was interrupted is continued, on this engine or another one, with the received ids appended to the
prompt. All arrays grow and are cut together; rows that were reported first stand, later ones follow behind them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import EngineError
from tidemill.core.grammar import Grammar
from tidemill.core.records import ROUTE_SENTINEL, Array, Generation, StopReason
from tidemill.core.seams import Chunk

LOGPROB_SLACK = 1e-3
"""How far above zero rounding may carry a logprob."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the policy is sampled."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    constrained: bool = False
    """Calls follow the renderer's grammar, where it has one."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature}: give a finite number, 0 for greedy")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: give a share in (0, 1], 1 for off")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k}: give a count, 0 for off")

    @property
    def has_support(self) -> bool:
        """Whether some ids could not be sampled, so that the support must be recorded."""
        return self.top_p < 1 or self.top_k > 0


@final
class GenerationBuilder:
    """Collects the chunks of one continuation, over any number of streams."""

    def __init__(
        self,
        *,
        position: int,
        prompt_ids: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        engine: str,
        grammar: Grammar | None = None,
    ) -> None:
        self._position = position
        self._prompt_ids = list(prompt_ids)
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._engine = engine
        self._grammar = grammar
        self._state = 0 if grammar is None else grammar.start
        self._has_support = sampling.has_support or grammar is not None
        self._logprobs: list[float] = []
        self._supports: list[list[int]] = []
        self._row_start = position
        self._kv_versions: NDArray[Any] = np.zeros(0, np.int32)
        self._routes: NDArray[Any] | None = None
        self.token_ids: list[int] = []
        self.versions: list[int] = []
        self.stop_reason: StopReason | None = None
        """Of the stream that ended last; None while one runs, or where it broke off."""

    @property
    def num_left(self) -> int:
        """What is left of the budget."""
        return self._max_tokens - len(self.token_ids)

    @property
    def grammar(self) -> Grammar | None:
        """What is left of it behind the tokens so far."""
        return None if self._grammar is None else msgspec.structs.replace(self._grammar, start=self._state)

    def begin_stream(self) -> None:
        self.stop_reason = None

    def add(self, chunk: Chunk) -> None:
        """Raises `EngineError` where the chunk's lists do not fit, or hold what no sampling can give."""
        num = len(chunk.token_ids)
        if self.stop_reason is not None:
            raise EngineError("the engine sent a chunk behind its last one")
        if len(chunk.logprobs) != num or len(chunk.versions) != num:
            raise EngineError(
                f"a chunk of {num} tokens has {len(chunk.logprobs)} logprobs and {len(chunk.versions)} versions: "
                "none may be missing"
            )
        for logprob in chunk.logprobs:
            if not (math.isfinite(logprob) and logprob <= LOGPROB_SLACK):
                raise EngineError(f"{logprob} is no logprob of a sampled token")
        if num > self.num_left:
            raise EngineError(f"the engine sent {num} tokens where {self.num_left} were left of the budget")
        self._add_supports(chunk)
        self.token_ids += chunk.token_ids
        self.versions += chunk.versions
        self._logprobs += chunk.logprobs
        self.stop_reason = chunk.stop_reason
        if chunk.kv_versions is not None:
            self._add_rows(chunk.row_start, chunk.kv_versions, chunk.routes)

    def _add_supports(self, chunk: Chunk) -> None:
        if not self._has_support:
            return
        supports = chunk.supports or []
        if len(supports) != len(chunk.token_ids):
            raise EngineError(
                f"a chunk of {len(chunk.token_ids)} tokens has {len(supports)} supports, under restricted sampling"
            )
        for token_id, support in zip(chunk.token_ids, supports, strict=True):
            is_free = self._follow(token_id, support) and not self._sampling.has_support
            if token_id not in support and not (is_free and not support):
                raise EngineError(f"token {token_id} was sampled from outside its support of {len(support)} ids")
        self._supports += supports

    def _follow(self, token_id: int, support: list[int]) -> bool:
        """One step of the grammar; returns whether it leaves the choice free. Raises `EngineError` where the engine
        has not kept to it: a wrong support would be a wrong ratio in training, and no error."""
        if self._grammar is None:
            return True
        allowed = self._grammar.allowed(self._state)
        if allowed is not None and not (support and set(support) <= set(allowed)):
            raise EngineError(f"a support of {len(support)} ids where the grammar allows {len(allowed)}")
        try:
            self._state = self._grammar.next(self._state, token_id)
        except ValueError as error:
            raise EngineError(str(error)) from error
        return allowed is None

    def _add_rows(self, row_start: int, kv_versions: Array, routes: Array | None) -> None:
        versions = kv_versions.numpy()
        experts = None if routes is None else routes.numpy()
        if experts is not None and len(experts) != len(versions):
            raise EngineError(f"{len(experts)} rows of routes beside {len(versions)} rows of KV versions")
        if len(self._kv_versions) and (experts is None) != (self._routes is None):
            raise EngineError("routes in one part of a generation and none in another")
        start = self._row_start if len(self._kv_versions) else row_start
        if experts is not None:
            self._routes = append_rows(start, self._routes, row_start, experts, ROUTE_SENTINEL)
        self._kv_versions = append_rows(start, self._kv_versions, row_start, versions, -1)
        self._row_start = start

    def build(self, stop_reason: StopReason) -> Generation:
        ids = offsets = None
        if self._has_support:
            ids = Array.of([id_ for support in self._supports for id_ in support], "int32")
            offsets = Array.of(np.cumsum([0, *map(len, self._supports)]), "int32")
        return Generation(
            position=self._position,
            prompt_ids=Array.of(self._prompt_ids, "int32"),
            token_ids=Array.of(self.token_ids, "int32"),
            logprobs=Array.of(self._logprobs, "float32"),
            versions=Array.of(self.versions, "int32"),
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            support_ids=ids,
            support_offsets=offsets,
            row_start=self._row_start,
            kv_versions=Array.of(self._kv_versions, "int32"),
            routes=None if self._routes is None else Array.of(self._routes, "uint16"),
            stop_reason=stop_reason,
            engine=self._engine,
        )


def append_rows(
    start: int, rows: NDArray[Any] | None, new_start: int, new_rows: NDArray[Any], unknown: int
) -> NDArray[Any]:
    """Rows of positions from `start` on, continued by those of `new_rows` that lie behind them.

    Old rows stand, also against new ones; positions that neither reports get `unknown`. New rows in front of `start`
    are left out: they belong to positions that an earlier generation has reported.
    """
    if rows is None or not len(rows):
        rows = new_rows[:0]
    stop = start + len(rows)
    gap = max(0, new_start - stop) if len(new_rows) else 0
    filler = np.full((gap, *new_rows.shape[1:]), unknown, new_rows.dtype)
    behind = new_rows[max(0, stop - new_start) :]
    return np.concatenate([rows, filler, behind])
