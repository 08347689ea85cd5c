"""An engine over HTTP: `POST /generate` streams chunks, `GET /status` tells how it stands."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import cast

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidemill.core.errors import EngineError, EngineUnavailable, RequestRefused
from tidemill.core.records import decode
from tidemill.core.seams import Chunk, Engine, GenerationRequest
from tidemill.engines.wire import KEEP_ALIVE, KEEP_ALIVE_S, chunk_frame, error_frame

MAX_BODY_BYTES = 16 << 20
"""Of one request: three million token ids."""


def engine_app(engine: Engine, token: str) -> Starlette:
    """An ASGI application; every path wants `Authorization: Bearer <token>`. Bind it to 127.0.0.1.

    Answers 401 without the token, 413 for an oversized body, 400 for one that is no request, 422 for a request that
    can never be served, 503 where the engine is away. A client that hangs up aborts its generation.
    """
    if not token:
        raise ValueError("the access token is empty: anyone could use the engine")
    expected = f"Bearer {token}".encode()

    def guarded(handle: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, expected):
                return PlainTextResponse("this engine wants its access token", status_code=401)
            try:
                return await handle(request)
            except RequestRefused as error:
                return PlainTextResponse(str(error), status_code=422)
            except EngineUnavailable as error:
                return PlainTextResponse(str(error), status_code=503)
            except EngineError as error:
                return PlainTextResponse(str(error), status_code=500)

        return endpoint

    async def generate(request: Request) -> Response:
        try:
            body = await _body(request)
        except ClientDisconnect:
            return Response(status_code=400)
        if body is None:
            return PlainTextResponse(f"the request is larger than {MAX_BODY_BYTES} bytes", status_code=413)
        try:
            wanted = decode(body, GenerationRequest)
        except ValueError as error:
            return PlainTextResponse(str(error), status_code=400)
        stream = _ChunkStream(engine, wanted)
        await stream.open()
        return stream

    async def status(_: Request) -> Response:
        return Response(msgspec.json.encode(await engine.status()), media_type="application/json")

    return Starlette(
        routes=[
            Route("/generate", guarded(generate), methods=["POST"]),
            Route("/status", guarded(status), methods=["GET"]),
        ]
    )


async def _body(request: Request) -> bytes | None:
    """None where it is too large; no more than the limit is ever held."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        return None
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


class _ChunkStream(Response):
    """Frames as the engine brings them, with signs of life between; watches for the client to hang up."""

    def __init__(self, engine: Engine, wanted: GenerationRequest) -> None:
        super().__init__(media_type="application/octet-stream")
        del self.headers["content-length"]
        self._chunks = cast(AsyncGenerator[Chunk, None], engine.generate(wanted))
        self._next: asyncio.Task[Chunk] = asyncio.ensure_future(anext(self._chunks))

    async def open(self) -> None:
        """Wait a little for the first chunk, so that a refusal is an answer with a status of its own."""
        try:
            await asyncio.wait({self._next}, timeout=KEEP_ALIVE_S)
            if self._next.done():
                self._next.result()
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_hung_up(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_chunks(send, gone)
        except OSError:  # the client hung up while we were sending
            pass
        finally:
            gone.cancel()
            await self._close()

    async def _send_chunks(self, send: Send, gone: "asyncio.Task[None]") -> None:
        more = True
        while more:
            await asyncio.wait({self._next, gone}, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return
            frame = KEEP_ALIVE
            if self._next.done():
                frame, more = self._take()
            await send({"type": "http.response.body", "body": frame, "more_body": more})

    def _take(self) -> tuple[bytes, bool]:
        """The next frame, and whether another follows."""
        try:
            chunk = self._next.result()
        except EngineUnavailable:
            return b"", False  # the client sees a stream that broke off, and resumes elsewhere
        except EngineError as error:
            return error_frame(str(error)), False
        more = chunk.stop_reason is None
        if more:
            self._next = asyncio.ensure_future(anext(self._chunks))
        return chunk_frame(chunk), more

    async def _close(self) -> None:
        self._next.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineError, StopAsyncIteration):
            await self._next
        await self._chunks.aclose()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
