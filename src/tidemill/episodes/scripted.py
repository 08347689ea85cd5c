"""An engine that says what a script tells it: real chunks, versions and rows, no model. For tests, and for
demonstrations, which run through the same harness as the policy."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import EngineUnavailable, RequestRefused
from tidemill.core.records import Array, StopReason, ToolCall
from tidemill.core.seams import Chunk, EngineStatus, GenerationRequest, Renderer
from tidemill.text.tokenizer import SPECIAL_TOKENS, common_prefix

Script = Callable[[list[int]], Sequence[int]]
"""Prompt ids → the ids to say, stop token included. Called once per turn."""


class Policy(Protocol):
    """Decides in words: what it sees is the text that the agent would see."""

    def act(self, text: str) -> ToolCall:
        """The next call, after `text` (the task at first, then each observation)."""
        ...


def spoken(policy: Policy, renderer: Renderer) -> Script:
    """A script that shows a policy what is new in the prompt, and says its call in the renderer's grammar.

    `renderer`: the one of the episode, which has opened it.
    """
    seen = 0

    def script(prompt_ids: list[int]) -> list[int]:
        nonlocal seen
        text = renderer.decode(prompt_ids[seen:])
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "")
        said = renderer.say([policy.act(text)])
        seen = len(prompt_ids) + len(said)
        return said

    return script


def script_of(turns: Sequence[Sequence[int]]) -> Script:
    """A script that says these turns one after the other."""
    rest = iter(turns)
    return lambda prompt_ids: next(rest)


@final
class ScriptedEngine:
    """`core.seams.Engine` over a script, for one episode at a time.

    Its distribution is certain: every logprob is 0.0, every support is the id itself. Version −1 says that no policy
    sampled the tokens. Interrupted, it goes on where the received ids end.
    """

    def __init__(
        self,
        script: Script,
        *,
        version: int = -1,
        swap_at: Mapping[int, int] | None = None,
        fail_at: Sequence[int] = (),
        abort_at: Sequence[int] = (),
        chunk_tokens: int = 4,
        delay_s: float = 0.0,
        routes_shape: tuple[int, int] | None = None,
        name: str = "scripted-0",
    ) -> None:
        """`swap_at`: sampled tokens so far → the version from then on. `fail_at`, `abort_at`: counts at which a stream
        breaks off, once each; an abort still reports its rows. `delay_s`: before each chunk. `routes_shape`: (MoE
        layers, experts per token)."""
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens {chunk_tokens} must be at least 1")
        self.version = version
        self.requests: list[GenerationRequest] = []
        self._script = script
        self._swap_at = dict(swap_at or {})
        self._fail_at, self._abort_at = sorted(fail_at), sorted(abort_at)
        self._chunk_tokens = chunk_tokens
        self._delay_s = delay_s
        self._routes_shape = routes_shape
        self._name = name
        self._turn: tuple[list[int], list[int]] = ([], [])
        self._num_sampled = 0
        self._num_prefill = 0
        self._num_running = 0
        self._num_swaps = 0
        self._is_closed = False

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        if self._is_closed:
            raise EngineUnavailable("the scripted engine is closed")
        if request.max_tokens < 1 or not request.prompt_ids:
            raise RequestRefused(f"max_tokens {request.max_tokens} and a prompt must be positive")
        self.requests.append(request)
        self._num_running += 1
        try:
            async for chunk in self._stream(request):
                yield chunk
        finally:
            self._num_running -= 1

    async def _stream(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        rest = self._rest(request.prompt_ids)
        has_support = (
            request.top_p < 1 or request.top_k > 0 or request.allowed_ids is not None or request.grammar is not None
        )
        kv_versions = [self.version] * len(request.prompt_ids)
        self._num_prefill += len(request.prompt_ids)
        said: list[int] = []
        reason: StopReason | None = None
        while reason is None:
            await asyncio.sleep(self._delay_s)
            ids: list[int] = []
            versions: list[int] = []
            is_broken = False
            while len(ids) < self._chunk_tokens and reason is None and not is_broken:
                if self._fail_at and self._fail_at[0] <= self._num_sampled:
                    self._fail_at.pop(0)
                    is_broken = True
                elif self._abort_at and self._abort_at[0] <= self._num_sampled:
                    self._abort_at.pop(0)
                    reason = "abort"
                elif len(said) == len(rest):
                    reason = "stop"
                else:
                    if self._num_sampled in self._swap_at:
                        self.version = self._swap_at.pop(self._num_sampled)
                        self._num_swaps += 1
                    if said:  # the token before this one was fed to sample this one
                        kv_versions.append(self.version)
                    ids.append(rest[len(said)])
                    versions.append(self.version)
                    said.append(ids[-1])
                    self._num_sampled += 1
                    if said[-1] in request.stop_ids:
                        reason = "stop"
                    elif len(said) == request.max_tokens:
                        reason = "length"
            rows = Array.of(kv_versions, "int32") if reason else None
            yield Chunk(
                token_ids=ids,
                logprobs=[0.0] * len(ids),
                versions=versions,
                supports=[[id_] for id_ in ids] if has_support else None,
                stop_reason=reason,
                kv_versions=rows,
                routes=Array.of(self.routes(kv_versions), "uint16") if reason and self._routes_shape else None,
            )
            if is_broken:
                raise EngineUnavailable(f"the script breaks off after {self._num_sampled} tokens")

    def routes(self, kv_versions: Sequence[int]) -> NDArray[np.uint16]:
        """uint16 [R, L, k] of positions 0 to R: which experts depends on position and version, and nothing else."""
        if self._routes_shape is None:
            raise ValueError("this engine has no routes")
        num_layers, num_experts = self._routes_shape
        base = np.arange(len(kv_versions)) * 7 + np.asarray(kv_versions, dtype=np.int64) * 131
        grid = base[:, None, None] + np.arange(num_layers)[:, None] * 3 + np.arange(num_experts)
        return np.asarray(grid % 251, dtype=np.uint16)

    def _rest(self, prompt_ids: list[int]) -> list[int]:
        """What is still to be said in this turn: a prompt that ends inside the turn's words continues it."""
        base, words = self._turn
        if base and common_prefix(prompt_ids, base) == len(base):
            received = prompt_ids[len(base) :]
            if words[: len(received)] == received:  # the next turn's prompt has more, behind all of the words
                return words[len(received) :]
        words = list(self._script(list(prompt_ids)))
        self._turn = (list(prompt_ids), words)
        return words

    async def status(self) -> EngineStatus:
        return EngineStatus(
            name=self._name,
            version=self.version,
            stage="ready",
            running=self._num_running,
            waiting=0,
            prefill_tokens=self._num_prefill,
            sampled_tokens=self._num_sampled,
            num_swaps=self._num_swaps,
            last_swap_s={},
            refused_loads=0,
        )

    async def close(self) -> None:
        self._is_closed = True
