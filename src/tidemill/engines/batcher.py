"""Continuous batching, without threads: requests in, one `step` after another, chunks out.

Each step feeds one token of every sequence that decodes, and a bounded number of prompt positions of those that do
not yet, through one forward pass. Requests wait in order of arrival.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.core.errors import EngineError, RequestRefused
from tidemill.core.records import Array, StopReason
from tidemill.core.seams import Chunk, GenerationRequest
from tidemill.engines.sampling import Policy, sample, uniforms
from tidemill.engines.slots import Slot, Slots
from tidemill.models.transformer import Span, Transformer

SwapMode = Literal["continue", "recompute", "finish"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    name: str = "engine-0"
    num_slots: int = 32
    """Sequences that have keys and values at once: running ones, and sessions that may come back."""
    context_tokens: int = 2048
    prefill_tokens: int = 256
    """Prompt positions in one step, so that a long prompt does not hold up those that decode."""
    flush_tokens: int = 8
    """Sampled tokens per chunk of a stream."""
    swap_mode: SwapMode = "continue"
    """What becomes of keys and values at new weights: kept and labelled, computed anew, or finished first."""

    def __post_init__(self) -> None:
        for name in ("num_slots", "context_tokens", "prefill_tokens", "flush_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine: {name} is {getattr(self, name)}; give at least 1")
        if self.swap_mode not in ("continue", "recompute", "finish"):
            raise ValueError(f"engine: swap_mode is {self.swap_mode!r}; give 'continue', 'recompute' or 'finish'")


@final
class Job:
    """A request on its way. Touched by the batcher alone once it was submitted."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.prompt: NDArray[np.int32] = np.array(request.prompt_ids, np.int32)
        allowed = None if request.allowed_ids is None else torch.tensor(sorted(set(request.allowed_ids)))
        self.free = Policy(request.temperature, request.top_p, request.top_k, allowed, request.seed)
        self.state = 0 if request.grammar is None else request.grammar.start
        self.stop_ids = frozenset(request.stop_ids)
        self.slot: Slot | None = None
        self.row_start = 0
        self.num_known = len(self.prompt)
        """Prompt and sampled tokens."""
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.supports: list[list[int]] = []
        """These four: what was sampled since the last chunk."""

    @property
    def has_support(self) -> bool:
        """Whether what could be sampled is recorded."""
        return self.free.is_restricted or self.request.grammar is not None

    @property
    def policy(self) -> Policy:
        """How the next token is sampled."""
        if self.request.grammar is None:
            return self.free
        allowed = self.request.grammar.allowed(self.state)
        return self.free if allowed is None else self.free._replace(allowed_ids=torch.tensor(allowed))

    def say(self, token: int, logprob: float, version: int, support: list[int] | None) -> None:
        """Take in a sampled token."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.has_support:
            self.supports.append(support or [])
        if self.request.grammar is not None:
            self.state = self.request.grammar.next(self.state, token)
        self.num_known += 1


Delivery = tuple[Job, Chunk | EngineError]


@final
class Batcher:
    """Holds the model, the slots and the requests. `step` is the only thing that computes."""

    def __init__(self, model: Transformer, version: int, config: EngineConfig) -> None:
        self.model = model
        self.version = version
        self.config = config
        self.context_tokens = min(config.context_tokens, model.config.max_positions)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.holding = False
        """Admit nothing: the running ones are to finish before a swap."""
        self.prefill_tokens = 0
        self.sampled_tokens = 0
        self._slots = Slots(model.config, config.num_slots, self.context_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or (bool(self.waiting) and not self.holding)

    def check(self, request: GenerationRequest) -> None:
        """Raises `RequestRefused` for a request that can never be served."""
        refuse_malformed(request, self.model.config.vocab_size)
        asked = len(request.prompt_ids) + request.max_tokens
        if asked > self.context_tokens:
            raise RequestRefused(
                f"{len(request.prompt_ids)} prompt tokens and up to {request.max_tokens} new ones are {asked}; this "
                f"engine holds {self.context_tokens}: shorten the prompt, or ask for fewer"
            )

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def abort(self, job: Job) -> None:
        """Idempotent; the computed prefix stays for the session's next request."""
        if job in self.waiting:
            self.waiting.remove(job)
        elif job in self.running:
            self._leave(job)

    def swap(self, model: Transformer, version: int) -> None:
        """Exchange the weights between two steps, and treat existing keys and values by `swap_mode`."""
        self.model, self.version = model, version
        if self.config.swap_mode == "continue":
            return
        self._slots.forget_idle()
        for job in self.running:
            _slot(job).num_fed = 0

    def step(self) -> list[Delivery]:
        """Admit, feed, sample. Returns what goes to the clients."""
        self._admit()
        decoding = [job for job in self.running if job.num_known - _slot(job).num_fed == 1]
        by_slot = {id(job.slot): job for job in decoding}
        decoding = [by_slot[id(slot)] for slot in self._slots.bring_to_front([_slot(job) for job in decoding])]
        spans, prefilling = self._plan_prefill(len(decoding))
        if not decoding and not spans:
            return []
        hidden_TD, routes_TLK = self._feed(decoding, prefilling, spans)
        routes = routes_TLK.numpy().astype(np.uint16)
        for row, job in enumerate(decoding):
            slot = _slot(job)
            self.prefill_tokens += slot.num_fed < len(job.prompt)
            slot.record(slot.num_fed, routes[row : row + 1], self.version)
        ready, where = list(decoding), list(range(len(decoding)))
        for job, span in zip(prefilling, spans, strict=True):
            end = span.start + span.num_tokens
            _slot(job).record(span.position, routes[span.start : end], self.version)
            self.prefill_tokens += span.num_tokens
            if _slot(job).num_fed == job.num_known:
                ready.append(job)
                where.append(end - 1)
        return self._sample(ready, hidden_TD[where]) if ready else []

    def _admit(self) -> None:
        while self.waiting and not self.holding:
            job = self.waiting[0]
            slot = self._slots.acquire(job.request.session, job.prompt, self.version)
            if slot is None:
                return
            job.slot = slot
            job.row_start = slot.num_reported
            self.running.append(self.waiting.popleft())

    def _plan_prefill(self, start: int) -> tuple[list[Span], list[Job]]:
        """Spans of prompt positions for this step, oldest request first; they follow `start` decoding tokens."""
        spans: list[Span] = []
        jobs: list[Job] = []
        budget = self.config.prefill_tokens
        for job in self.running:
            slot = _slot(job)
            num_tokens = min(job.num_known - slot.num_fed, budget)
            if job.num_known - slot.num_fed == 1 or num_tokens == 0:
                continue
            spans.append(Span(slot.row, start, slot.num_fed, num_tokens))
            jobs.append(job)
            start += num_tokens
            budget -= num_tokens
        return spans, jobs

    def _feed(self, decoding: Sequence[Job], prefilling: Sequence[Job], spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
        slots = [_slot(job) for job in decoding]
        tokens = [np.array([slot.ids[slot.num_fed] for slot in slots], np.int64)]
        positions = [np.array([slot.num_fed for slot in slots], np.int64)]
        for job, span in zip(prefilling, spans, strict=True):
            end = span.position + span.num_tokens
            tokens.append(_slot(job).ids[span.position : end].astype(np.int64))
            positions.append(np.arange(span.position, end))
        tokens_T, positions_T = (torch.from_numpy(np.concatenate(parts)) for parts in (tokens, positions))
        return self.model.forward_cached(tokens_T, positions_T, self._slots.cache, len(decoding), spans)

    def _sample(self, jobs: Sequence[Job], hidden_BD: Tensor) -> list[Delivery]:
        draws = uniforms([job.request.seed for job in jobs], [job.num_known for job in jobs])
        sampled = sample(self.model.logits(hidden_BD), [job.policy for job in jobs], draws)
        deliveries: list[Delivery] = []
        for job, token, logprob, support in zip(jobs, *sampled, strict=True):
            if not math.isfinite(logprob):
                self._slots.wipe(self._leave(job))
                deliveries.append((job, EngineError(f"version {self.version} gives NaN: publish a sound one")))
                continue
            slot = _slot(job)
            self.sampled_tokens += 1
            job.say(token, logprob, self.version, support)
            num_sampled = job.num_known - len(job.prompt)
            if token in job.stop_ids:
                deliveries.append((job, self._finish(job, "stop")))
            elif num_sampled == job.request.max_tokens:
                deliveries.append((job, self._finish(job, "length")))
            else:
                slot.ids[job.num_known - 1] = token
                if len(job.ids) == self.config.flush_tokens:
                    deliveries.append((job, _flush(job)))
        return deliveries

    def _finish(self, job: Job, reason: StopReason) -> Chunk:
        slot = self._leave(job)
        rows = slice(job.row_start, slot.num_recorded)
        slot.num_reported = slot.num_recorded
        return _flush(
            job,
            reason,
            row_start=job.row_start,
            kv_versions=Array.of(slot.kv_versions[rows], "int32"),
            routes=Array.of(slot.routes[rows], "uint16"),
        )

    def _leave(self, job: Job) -> Slot:
        self.running.remove(job)
        slot = _slot(job)
        self._slots.release(slot)
        return slot


def refuse_malformed(request: GenerationRequest, vocab_size: int) -> None:
    """Raises `RequestRefused` for what no engine with this vocabulary can serve."""
    for what, ids in (("prompt_ids", request.prompt_ids), ("allowed_ids", request.allowed_ids)):
        if ids is not None and not ids:
            raise RequestRefused(f"{what} is empty: give at least one token")
        if ids is not None and (min(ids) < 0 or max(ids) >= vocab_size):
            raise RequestRefused(f"{what} holds ids {min(ids)} to {max(ids)}; the vocabulary is 0 to {vocab_size - 1}")
    if request.grammar is not None:
        if request.allowed_ids is not None:
            raise RequestRefused("allowed_ids and a grammar: give one of them")
        if fault := request.grammar.fault(request.stop_ids, vocab_size):
            raise RequestRefused(f"the grammar does not work: {fault}")
    if request.max_tokens < 1:
        raise RequestRefused(f"max_tokens is {request.max_tokens}; ask for at least 1")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise RequestRefused(f"temperature is {request.temperature}; give 0 or more")
    if not 0 < request.top_p <= 1:
        raise RequestRefused(f"top_p is {request.top_p}; give more than 0 and at most 1")
    if request.top_k < 0:
        raise RequestRefused(f"top_k is {request.top_k}; give 0 (off) or more")


def _flush(
    job: Job,
    reason: StopReason | None = None,
    *,
    row_start: int = 0,
    kv_versions: Array | None = None,
    routes: Array | None = None,
) -> Chunk:
    chunk = Chunk(
        token_ids=job.ids,
        logprobs=job.logprobs,
        versions=job.versions,
        supports=job.supports if job.has_support else None,
        stop_reason=reason,
        row_start=row_start,
        kv_versions=kv_versions,
        routes=routes,
    )
    job.ids, job.logprobs, job.versions, job.supports = [], [], [], []
    return chunk


def _slot(job: Job) -> Slot:
    assert job.slot is not None, "a running job has a slot"
    return job.slot
