"""The engine inside this process: one thread computes, asyncio passes messages."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Literal, NamedTuple, final

import torch

from tidemill.core.errors import EngineError, EngineUnavailable, ModelError
from tidemill.core.seams import Chunk, EngineStatus, GenerationRequest, Weights
from tidemill.engines.batcher import Batcher, Delivery, EngineConfig, Job
from tidemill.models.hf import model_of
from tidemill.models.transformer import Transformer

Message = Chunk | EngineError


class _Client(NamedTuple):
    loop: asyncio.AbstractEventLoop
    queue: "asyncio.Queue[Message]"


class _Swap(NamedTuple):
    model: Transformer
    version: int
    done: "Future[float]"
    """Resolves to the seconds during which nothing was computed."""


@final
class EmbeddedEngine:
    """A policy served in this process (`core.seams.Engine`). It has no version until the first `swap`.

    `on_death` is called, from the engine's thread, when that thread dies of an error: a run must then stop.
    """

    def __init__(
        self, config: EngineConfig | None = None, *, on_death: Callable[[BaseException], None] | None = None
    ) -> None:
        self.config = config or EngineConfig()
        self._on_death = on_death
        self._wake = threading.Condition()
        # All below is shared with the thread and touched only while `_wake` is held; the batcher is the thread's own.
        self._clients: dict[Job, _Client] = {}
        self._new: list[Job] = []
        self._aborted: list[Job] = []
        self._swap: _Swap | None = None
        self._swapping = False
        self._failure = ""
        self._num_swaps = 0
        self._last_swap_s: dict[str, float] = {}
        self._refused_loads = 0
        self._batcher: Batcher | None = None
        self._loading = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=self.config.name, daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """−1 before the first weights."""
        return -1 if self._batcher is None else self._batcher.version

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        client = _Client(asyncio.get_running_loop(), asyncio.Queue())
        job = self._submit(request, client)
        try:
            while True:
                message = await client.queue.get()
                if isinstance(message, EngineError):
                    raise message
                yield message
                if message.stop_reason is not None:
                    return
        finally:
            with self._wake:
                if self._clients.pop(job, None) is not None:
                    self._aborted.append(job)
                    self._wake.notify()

    async def status(self) -> EngineStatus:
        with self._wake:
            if self._failure:
                raise EngineUnavailable(self._failure)
            batcher = self._batcher
            stage: Literal["loading", "ready", "swapping"] = "swapping" if self._swapping else "ready"
            return EngineStatus(
                name=self.config.name,
                version=self.version,
                stage="loading" if batcher is None else stage,
                running=len(batcher.running) if batcher else 0,
                waiting=len(self._new) + (len(batcher.waiting) if batcher else 0),
                prefill_tokens=batcher.prefill_tokens if batcher else 0,
                sampled_tokens=batcher.sampled_tokens if batcher else 0,
                num_swaps=self._num_swaps,
                last_swap_s=dict(self._last_swap_s),
                refused_loads=self._refused_loads,
            )

    async def close(self) -> None:
        """Requests in flight get `EngineUnavailable`. Idempotent."""
        self._fail(f"{self.config.name} was closed")
        await asyncio.to_thread(self._thread.join)

    def swap(self, version: int, weights: Weights, *, fetch_s: float = 0.0) -> bool:
        """Move to new weights: prepared on the caller's thread while serving goes on, exchanged between two steps.

        False for a version that is not newer than the present one. Raises `ModelError` for weights that cannot be
        used. In both cases nothing changes, and `refused_loads` counts it. With swap mode `finish` it returns once
        the requests that were running are done.
        """
        with self._loading:
            start = time.monotonic()
            try:
                if version <= self.version:
                    self._count_refused()
                    return False
                model = model_of(weights)
                if self._batcher is not None and model.config != self._batcher.model.config:
                    raise ModelError(f"version {version} has another shape than the model that {self.config.name} runs")
            except ModelError:
                self._count_refused()
                raise
            prepare_s = time.monotonic() - start
            pause_s = self._exchange(model.requires_grad_(False), version)
            with self._wake:
                self._num_swaps += 1
                self._last_swap_s = {"fetch": fetch_s, "prepare": prepare_s, "pause": pause_s}
            return True

    def _exchange(self, model: Transformer, version: int) -> float:
        swap = _Swap(model, version, Future())
        with self._wake:
            if self._failure:
                raise EngineUnavailable(self._failure)
            self._swap, self._swapping = swap, True
            self._wake.notify()
        try:
            return swap.done.result()
        finally:
            with self._wake:
                self._swapping = False

    def _count_refused(self) -> None:
        with self._wake:
            self._refused_loads += 1

    def _submit(self, request: GenerationRequest, client: _Client) -> Job:
        with self._wake:
            if self._failure:
                raise EngineUnavailable(self._failure)
            if self._batcher is None:
                raise EngineUnavailable(f"{self.config.name} has no weights yet: ask again")
            self._batcher.check(request)
            job = Job(request)
            self._clients[job] = client
            self._new.append(job)
            self._wake.notify()
            return job

    # --- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._take_messages():
                    if self._batcher is not None and self._batcher.has_work:
                        self._deliver(self._batcher.step())
        except BaseException as error:  # a dead engine must be loud, whatever killed it
            self._fail(f"{self.config.name} died: {type(error).__name__}: {error}")
            if self._on_death is not None:
                self._on_death(error)

    def _take_messages(self) -> bool:
        """Wait for work and take in what has come. False where the engine was closed."""
        with self._wake:
            while not self._has_messages():
                self._wake.wait()
            if self._failure:
                return False
            new, self._new = self._new, []
            aborted, self._aborted = self._aborted, []
            swap = self._swap
        if self._batcher is not None:
            for job in new:
                self._batcher.submit(job)
            for job in aborted:
                self._batcher.abort(job)
        if swap is not None:
            self._try_swap(swap)
        return True

    def _has_messages(self) -> bool:
        return bool(
            self._new
            or self._aborted
            or self._swap is not None
            or self._failure
            or (self._batcher is not None and self._batcher.has_work)
        )

    def _try_swap(self, swap: _Swap) -> None:
        start = time.monotonic()
        if self._batcher is None:
            self._batcher = Batcher(swap.model, swap.version, self.config)
        else:
            if self.config.swap_mode == "finish" and self._batcher.running:
                self._batcher.holding = True
                return
            self._batcher.holding = False
            self._batcher.swap(swap.model, swap.version)
        with self._wake:
            self._swap = None
        swap.done.set_result(time.monotonic() - start)

    def _deliver(self, deliveries: list[Delivery]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Message], Message]]] = {}
        with self._wake:
            for job, message in deliveries:
                last = isinstance(message, EngineError) or message.stop_reason is not None
                client = self._clients.pop(job, None) if last else self._clients.get(job)
                if client is not None:
                    by_loop.setdefault(client.loop, []).append((client.queue, message))
        for loop, messages in by_loop.items():
            _post(loop, messages)

    def _fail(self, cause: str) -> None:
        """The first cause stands; every client and a waiting swap get it."""
        with self._wake:
            self._failure = cause = self._failure or cause
            clients, self._clients = self._clients, {}
            swap, self._swap = self._swap, None
            self._wake.notify()
        for client in clients.values():
            _post(client.loop, [(client.queue, EngineUnavailable(cause))])
        if swap is not None and not swap.done.done():
            swap.done.set_exception(EngineUnavailable(cause))


def _post(loop: asyncio.AbstractEventLoop, messages: list[tuple["asyncio.Queue[Message]", Message]]) -> None:
    def put() -> None:
        for queue, message in messages:
            queue.put_nowait(message)

    with contextlib.suppress(RuntimeError):  # the loop was closed with its streams open: nobody is left to tell
        loop.call_soon_threadsafe(put)
