"""One suite over every engine: embedded, over HTTP, a fleet of them, and the scripted one that ships for tests."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import uvicorn

from tidemill.core.errors import EngineUnavailable, RequestRefused
from tidemill.core.seams import Chunk, Engine, GenerationRequest
from tidemill.engines.batcher import EngineConfig
from tidemill.engines.client import Fleet, HttpEngine
from tidemill.engines.embedded import EmbeddedEngine
from tidemill.engines.http import engine_app
from tidemill.episodes.scripted import ScriptedEngine
from tidemill.models.config import ModelConfig
from tidemill.models.hf import weights_of
from tidemill.models.transformer import init_model

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=4,
    experts_per_token=2,
    expert_size=8,
    max_positions=256,
)
WEIGHTS = weights_of(init_model(CONFIG, 0, std=0.3), {})
TOKEN = "a-token"
DEADLINE_S = 20.0
WORDS = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    """The engine behind a real server on a free loopback port; yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(engine_app(engine, TOKEN), log_level="error", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(DEADLINE_S)
        listener.close()
        assert not thread.is_alive()


def embedded() -> EmbeddedEngine:
    engine = EmbeddedEngine(EngineConfig(num_slots=4, context_tokens=200, flush_tokens=3))
    engine.swap(0, WEIGHTS)
    return engine


@contextmanager
def make(kind: str) -> Iterator[Engine]:
    match kind:
        case "embedded":
            yield embedded()
        case "scripted":
            yield ScriptedEngine(lambda _: WORDS, version=0, chunk_tokens=3)
        case _:
            inner: Engine = ScriptedEngine(lambda _: WORDS, version=0) if "scripted" in kind else embedded()
            with served(inner) as url:
                yield Fleet([HttpEngine(url, TOKEN)]) if "fleet" in kind else HttpEngine(url, TOKEN)
            asyncio.run(inner.close())


@pytest.fixture(params=["embedded", "scripted", "http", "http over scripted", "fleet"])
def check(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[Engine], Awaitable[None]]], None]]:
    """Runs a test of one engine in an event loop, with a deadline, and closes the engine."""

    def run(test: Callable[[Engine], Awaitable[None]]) -> None:
        async def main() -> None:
            try:
                await asyncio.wait_for(test(engine), DEADLINE_S)
            finally:
                await engine.close()

        asyncio.run(main())

    with make(request.param) as engine:
        yield run


Check = Callable[[Callable[[Engine], Awaitable[None]]], None]


def wanted(max_tokens: int = 10, prompt: list[int] | None = None, **more: object) -> GenerationRequest:
    fields = {"session": "s", "prompt_ids": prompt or [1, 2, 3], "max_tokens": max_tokens, "stop_ids": []} | more
    return GenerationRequest(**fields)  # type: ignore[arg-type]


async def chunks_of(engine: Engine, request: GenerationRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


def test_a_stream_is_whole(check: Check) -> None:
    async def test(engine: Engine) -> None:
        chunks = await chunks_of(engine, wanted())
        assert [c.stop_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].stop_reason == "length"
        assert sum(len(c.token_ids) for c in chunks) == 10
        for chunk in chunks:
            assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions)
            assert all(lp <= 0 for lp in chunk.logprobs) and set(chunk.versions) <= {0}
            assert chunk.supports is None
        rows = chunks[-1].kv_versions
        assert rows is not None and chunks[-1].row_start + len(rows.numpy()) == 3 + 10 - 1

    check(test)


def test_it_stops_at_a_stop_id_and_includes_it(check: Check) -> None:
    async def test(engine: Engine) -> None:
        ids = [i for c in await chunks_of(engine, wanted(seed=1)) for i in c.token_ids]
        chunks = await chunks_of(engine, wanted(prompt=[1, 2, 3, *ids[:2]], seed=1, stop_ids=[ids[4]]))
        again = [i for c in chunks for i in c.token_ids]
        assert chunks[-1].stop_reason == "stop" and again[-1] == ids[4] and ids[4] not in again[:-1]

    check(test)


def test_supports_are_told_where_sampling_is_restricted(check: Check) -> None:
    async def test(engine: Engine) -> None:
        for restriction in ({"top_k": 3}, {"top_p": 0.5}, {"allowed_ids": WORDS}):
            for chunk in await chunks_of(engine, wanted(**restriction)):
                assert chunk.supports is not None and len(chunk.supports) == len(chunk.token_ids)
                for token, support in zip(chunk.token_ids, chunk.supports, strict=True):
                    assert token in support
                    assert len(support) <= 3 or "top_k" not in restriction

    check(test)


def test_the_same_request_gives_the_same_tokens(check: Check) -> None:
    async def test(engine: Engine) -> None:
        first, second = [await chunks_of(engine, wanted(session=s, seed=9)) for s in "ab"]
        assert [i for c in first for i in c.token_ids] == [i for c in second for i in c.token_ids]

    check(test)


def test_what_can_never_be_served_is_refused(check: Check) -> None:
    async def test(engine: Engine) -> None:
        with pytest.raises(RequestRefused, match="max_tokens"):
            await chunks_of(engine, wanted(0))
        assert len(await chunks_of(engine, wanted(1))) >= 1

    check(test)


async def _until_idle(engine: Engine) -> None:
    while (await engine.status()).running:
        await asyncio.sleep(0.001)


def test_closing_the_iterator_aborts(check: Check) -> None:
    async def test(engine: Engine) -> None:
        stream = cast(AsyncGenerator[Chunk, None], engine.generate(wanted(12)))
        assert len((await anext(stream)).token_ids) >= 1
        await stream.aclose()
        await _until_idle(engine)
        assert len(await chunks_of(engine, wanted(2))) >= 1

    check(test)


def test_status_counts(check: Check) -> None:
    async def test(engine: Engine) -> None:
        before = await engine.status()
        await chunks_of(engine, wanted(10, session="t"))
        after = await engine.status()
        assert (after.stage, after.version, after.running, after.waiting) == ("ready", 0, 0, 0)
        assert after.sampled_tokens - before.sampled_tokens == 10
        assert after.prefill_tokens > before.prefill_tokens

    check(test)


def test_streams_side_by_side_do_not_mix(check: Check) -> None:
    async def test(engine: Engine) -> None:
        if isinstance(engine, ScriptedEngine) or (await engine.status()).name.startswith("scripted"):
            pytest.skip("serves one episode at a time")
        requests = [wanted(10 + i, [i + 1, i + 2], session=str(i), seed=i) for i in range(6)]
        alone = [await chunks_of(engine, one) for one in requests]
        together = await asyncio.gather(*(chunks_of(engine, one) for one in requests))
        for expected, found in zip(alone, together, strict=True):
            assert [i for c in found for i in c.token_ids] == [i for c in expected for i in c.token_ids]

    check(test)


def test_a_closed_engine_is_unavailable() -> None:
    for kind in ("embedded", "scripted"):
        with make(kind) as engine:

            async def test(engine: Engine = engine) -> None:
                await engine.close()
                with pytest.raises(EngineUnavailable):
                    await chunks_of(engine, wanted())

            asyncio.run(test())


def test_the_deadline_of_a_server_thread_is_kept() -> None:
    """The server helper itself: no thread outlives its block."""
    start, before = time.monotonic(), threading.active_count()
    with served(ScriptedEngine(lambda _: WORDS)):
        pass
    assert threading.active_count() == before and time.monotonic() - start < DEADLINE_S
