"""Over HTTP: who may ask, what is too much, and what a client sees of an engine or a connection that dies."""

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import cast

import httpx
import msgspec
import pytest
import uvicorn

from tidemill.core.errors import EngineError, EngineUnavailable, RequestRefused
from tidemill.core.grammar import Grammar
from tidemill.core.records import decode, encode
from tidemill.core.seams import Chunk, Engine, EngineStatus, GenerationRequest
from tidemill.engines import http as engines_http
from tidemill.engines.client import Fleet, HttpEngine
from tidemill.engines.http import engine_app
from tidemill.engines.wire import KEEP_ALIVE, chunk_frame, error_frame, read_chunks

TOKEN = "a-token"
DEADLINE_S = 20.0
PIECE = Chunk(token_ids=[1], logprobs=[-0.5], versions=[0])
LAST = Chunk(token_ids=[2], logprobs=[-0.5], versions=[0], stop_reason="stop")
REQUEST = GenerationRequest(session="s", prompt_ids=[1], max_tokens=4, stop_ids=[])


class FakeEngine:
    """Yields what it was given; an exception among it is raised, an event is waited for."""

    def __init__(self, *script: Chunk | Exception | asyncio.Event, name: str = "fake") -> None:
        self.script = script
        self.name = name
        self.asked = 0
        self.closed = threading.Event()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        self.asked += 1
        try:
            for item in self.script:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, asyncio.Event):
                    await item.wait()
                else:
                    yield item
        finally:
            self.closed.set()

    async def status(self) -> EngineStatus:
        return EngineStatus(
            name=self.name,
            version=3,
            stage="ready",
            running=1,
            waiting=2,
            prefill_tokens=3,
            sampled_tokens=4,
            num_swaps=1,
            last_swap_s={},
            refused_loads=0,
        )

    async def close(self) -> None:
        pass


@contextmanager
def served(engine: Engine) -> Iterator[str]:
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


def ask(inner: Engine, test: Callable[[HttpEngine], Awaitable[None]], token: str = TOKEN) -> None:
    async def main(url: str) -> None:
        engine = HttpEngine(url, token)
        try:
            await asyncio.wait_for(test(engine), DEADLINE_S)
        finally:
            await engine.close()

    with served(inner) as url:
        asyncio.run(main(url))


async def take(engine: Engine) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(REQUEST)]


def test_without_the_token_nothing_is_told() -> None:
    async def test(engine: HttpEngine) -> None:
        with pytest.raises(EngineError, match="access token"):
            await take(engine)
        with pytest.raises(EngineError, match="access token"):
            await engine.status()

    inner = FakeEngine(LAST)
    for token in ("a-toke", "a-token2", "A-TOKEN"):
        ask(inner, test, token)
    assert inner.asked == 0

    with served(inner) as url:
        assert httpx.get(f"{url}/status", trust_env=False).status_code == 401
    with pytest.raises(ValueError, match="token is empty"):
        engine_app(inner, "")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestRefused("10 tokens; this engine holds 5"), RequestRefused),
        (EngineUnavailable("has no weights yet"), EngineUnavailable),
        (EngineError("gives NaN"), EngineError),
    ],
)
def test_an_error_keeps_its_kind_and_words(error: Exception, kind: type[Exception]) -> None:
    async def test(engine: HttpEngine) -> None:
        with pytest.raises(kind, match=str(error)) as caught:
            await take(engine)
        assert type(caught.value) is kind

    ask(FakeEngine(error), test)


@pytest.mark.parametrize(
    ("error", "kind"), [(EngineUnavailable("died"), EngineUnavailable), (EngineError("gives NaN"), EngineError)]
)
def test_an_error_in_the_middle_of_a_stream(error: Exception, kind: type[Exception]) -> None:
    async def test(engine: HttpEngine) -> None:
        stream = engine.generate(REQUEST)
        assert (await anext(stream)).token_ids == [1]
        with pytest.raises(EngineError) as caught:
            await anext(stream)
        assert type(caught.value) is kind

    ask(FakeEngine(PIECE, error), test)


def test_requests_that_are_too_large_or_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_http, "MAX_BODY_BYTES", 500)
    inner = FakeEngine(LAST)
    headers = {"authorization": f"Bearer {TOKEN}"}

    def pieces() -> Iterator[bytes]:
        yield from [bytes(100)] * 6

    with served(inner) as url, httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
        assert client.post("/generate", content=bytes(501)).status_code == 413
        assert client.post("/generate", content=pieces()).status_code == 413
        assert client.post("/generate", content=b"\xc1").status_code == 400
        extra = msgspec.msgpack.encode({"session": "s", "prompt_ids": [1], "max_tokens": 1, "stop_ids": [], "x": 1})
        answer = client.post("/generate", content=extra)
        assert answer.status_code == 400 and "`x`" in answer.text
        assert client.get("/generate").status_code == 405
        assert inner.asked == 0
        assert client.post("/generate", content=encode(REQUEST)).status_code == 200


def test_a_client_that_hangs_up_aborts_its_generation() -> None:
    inner = FakeEngine(PIECE, asyncio.Event(), LAST)

    async def test(engine: HttpEngine) -> None:
        stream = cast(AsyncGenerator[Chunk, None], engine.generate(REQUEST))
        await anext(stream)
        assert not inner.closed.is_set()
        await stream.aclose()
        assert await asyncio.to_thread(inner.closed.wait, DEADLINE_S)

    ask(inner, test)


def test_a_long_silence_is_filled_with_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_http, "KEEP_ALIVE_S", 0.01)
    hold = asyncio.Event()

    async def main(url: str) -> None:
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with (
            httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as client,
            client.stream("POST", "/generate", content=encode(REQUEST)) as response,
        ):
            received = b""
            async for piece in response.aiter_raw():
                received += piece
                if len(received) >= 12:
                    break
            assert received.startswith(KEEP_ALIVE * 3)

    with served(FakeEngine(hold, LAST)) as url:
        asyncio.run(asyncio.wait_for(main(url), DEADLINE_S))


def test_status_travels() -> None:
    async def test(engine: HttpEngine) -> None:
        status = await engine.status()
        assert (status.name, status.version, status.waiting) == ("fake", 3, 2)

    ask(FakeEngine(), test)


async def _from_pieces(pieces: list[bytes]) -> list[Chunk]:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return [chunk async for chunk in read_chunks(stream())]


@pytest.mark.parametrize("num_bytes", [1, 3, 7, 1000])
def test_frames_may_be_cut_anywhere(num_bytes: int) -> None:
    data = chunk_frame(PIECE) + KEEP_ALIVE + chunk_frame(LAST)
    pieces = [data[i : i + num_bytes] for i in range(0, len(data), num_bytes)]
    assert [c.token_ids for c in asyncio.run(_from_pieces(pieces))] == [[1], [2]]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", EngineUnavailable),
        (chunk_frame(PIECE), EngineUnavailable),
        (chunk_frame(LAST)[:-1], EngineUnavailable),
        (b"\x7f\xff\xff\xff", EngineUnavailable),
        (b"\x00\x00\x00\x01\xc1", EngineUnavailable),
        (error_frame("gives NaN"), EngineError),
    ],
)
def test_a_stream_that_is_cut_off_or_damaged_is_never_taken_for_whole(data: bytes, kind: type[Exception]) -> None:
    with pytest.raises(EngineError) as caught:
        asyncio.run(_from_pieces([data]))
    assert type(caught.value) is kind


def test_nobody_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def main() -> None:
        engine = HttpEngine(url, TOKEN)
        with pytest.raises(EngineUnavailable, match="went away"):
            await take(engine)
        with pytest.raises(EngineUnavailable, match="went away"):
            await engine.status()
        await engine.close()

    asyncio.run(main())


def _for(session: str) -> GenerationRequest:
    return msgspec.structs.replace(REQUEST, session=session)


def test_a_fleet_keeps_a_session_on_one_engine_and_spreads_sessions() -> None:
    engines = [FakeEngine(LAST, name=str(i)) for i in range(3)]
    fleet = Fleet(engines)

    async def main() -> None:
        for _ in range(5):
            [_ async for _ in fleet.generate(_for("one"))]
        assert sorted(e.asked for e in engines) == [0, 0, 5]
        for i in range(60):
            [_ async for _ in fleet.generate(_for(str(i)))]
        assert min(e.asked for e in engines) >= 8
        assert (await fleet.status()).sampled_tokens == 12

    asyncio.run(main())


def test_a_fleet_passes_over_engines_that_are_away() -> None:
    away, well = FakeEngine(EngineUnavailable("gone")), FakeEngine(LAST)
    fleet = Fleet([away, well])

    async def main() -> None:
        for i in range(20):
            assert [c async for c in fleet.generate(_for(str(i)))] == [LAST]
        assert well.asked == 20 and away.asked == 1  # asked once, then left alone for a while

    asyncio.run(main())


def test_a_fleet_does_not_hide_a_stream_that_broke_off() -> None:
    """Another engine would sample other tokens: the caller resumes, and gets that other engine."""
    first = FakeEngine(PIECE, EngineUnavailable("gone"))
    engines = [first, FakeEngine(PIECE, EngineUnavailable("gone"))]
    fleet = Fleet(engines)

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match="gone"):
                [_ async for _ in fleet.generate(REQUEST)]
        assert [e.asked for e in engines] == [1, 1]

    asyncio.run(main())


def test_a_fleet_with_nobody_there() -> None:
    fleet = Fleet([FakeEngine(EngineUnavailable("gone"))])
    with pytest.raises(EngineUnavailable, match="gone"):
        asyncio.run(take(fleet))
    with pytest.raises(ValueError, match="no engines"):
        Fleet([])


def test_a_request_with_a_grammar_travels_as_it_is() -> None:
    grammar = Grammar.of([{3: 1, 9: 1}, {}], [-1, 1])
    wanted = msgspec.structs.replace(REQUEST, grammar=grammar)
    received = decode(encode(wanted), GenerationRequest)
    assert received.grammar is not None
    assert encode(received) == encode(wanted) and received.grammar.allowed(0) == [3, 9]
