"""The coordinator's port: one POST path per call of the seam, a bearer token, bodies of bounded size."""

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tidemill.batches.coordinator import JournalCoordinator
from tidemill.batches.wire import (
    MAX_REQUEST_BYTES,
    MAX_WAIT_S,
    MEDIA_TYPE,
    BatchCall,
    DemonstrationsCall,
    Failure,
    HaltCall,
    LeaseCall,
    RenewCall,
    StatusCall,
)
from tidemill.core.errors import TidemillError, TrainingHalted
from tidemill.core.records import AttemptResult, Record, decode

C = TypeVar("C", bound=Record)


def coordinator_app(coordinator: JournalCoordinator, token: str) -> Starlette:
    """The ASGI application. Every path needs `Authorization: Bearer <token>`."""

    def route(path: str, kind: type[C], answer: Callable[[C], Awaitable[object]]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                return await _serve(request, token, kind, answer)
            except ClientDisconnect:
                return Response(status_code=499)

        return Route(path, endpoint, methods=["POST"])

    def wait(wait_s: float) -> float:
        return min(max(wait_s, 0.0), MAX_WAIT_S)

    return Starlette(
        routes=[
            route(
                "/lease",
                LeaseCall,
                lambda c: coordinator.lease(c.worker, c.instance, c.num, wait(c.wait_s), request=c.request),
            ),
            route("/renew", RenewCall, lambda c: coordinator.renew(c.worker, c.instance, c.lease_ids)),
            route("/complete", AttemptResult, coordinator.complete),
            route("/batch", BatchCall, lambda c: coordinator.batch(c.index, wait(c.wait_s))),
            route("/demonstrations", DemonstrationsCall, lambda c: coordinator.demonstrations(wait(c.wait_s))),
            route("/halt", HaltCall, lambda c: coordinator.halt(c.cause)),
            route("/status", StatusCall, lambda _: coordinator.status()),
        ]
    )


def coordinator_server(
    coordinator: JournalCoordinator, token: str, *, port: int, host: str = "127.0.0.1"
) -> uvicorn.Server:
    """A server to `await serve()`. Stopped by SIGTERM, SIGINT or `should_exit`, it ends the long polls first."""
    config = uvicorn.Config(
        coordinator_app(coordinator, token),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
    )
    return _CoordinatorServer(config, coordinator)


@final
class _CoordinatorServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, coordinator: JournalCoordinator) -> None:
        super().__init__(config)
        self._coordinator = coordinator

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._coordinator.end_polls()
        await super().shutdown(sockets)


async def _serve(request: Request, token: str, kind: type[C], answer: Callable[[C], Awaitable[object]]) -> Response:
    given = request.headers.get("authorization", "").encode("latin-1")
    if not hmac.compare_digest(given, f"Bearer {token}".encode("latin-1")):
        return _failure(401, "refused", "wrong access token: it is in the run folder's `token`")
    body = await _body(request)
    if body is None:
        return _failure(413, "refused", f"request of more than {MAX_REQUEST_BYTES} bytes")
    try:
        call = decode(body, kind)
    except ValueError as error:
        return _failure(400, "refused", str(error))
    try:
        found = await _unless_gone(request, answer(call))
    except TrainingHalted as error:
        return _failure(409, "halted", str(error))
    except TidemillError as error:
        return _failure(400, "failed", str(error))
    return Response(msgspec.msgpack.encode(found), media_type=MEDIA_TYPE)


async def _body(request: Request) -> bytes | None:
    """The request's body; None where it is too large."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_REQUEST_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


async def _unless_gone(request: Request, answer: Awaitable[object]) -> Any:
    """The answer; given up where the caller hangs up, so that nothing is leased to nobody."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        gone.cancel()
        work.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _failure(status: int, kind: Any, message: str) -> Response:
    return Response(
        msgspec.msgpack.encode(Failure(kind=kind, message=message)), status_code=status, media_type=MEDIA_TYPE
    )
