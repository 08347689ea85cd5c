"""The coordinator as its callers see it: HTTP with patience. Every call may be repeated, so it is."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar, final

import httpx
import msgspec

from tidemill.batches.wire import (
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
from tidemill.core.errors import CoordinatorError, CoordinatorUnavailable, TrainingHalted
from tidemill.core.records import Attempt, AttemptResult, Batch, Record, encode
from tidemill.core.seams import RunStatus

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0

T = TypeVar("T")


@final
class HttpCoordinator:
    """`core.seams.Coordinator` over HTTP.

    A call that finds the coordinator away is repeated for `patience_s`, then raises `CoordinatorUnavailable`.
    """

    def __init__(self, url: str, token: str, *, patience_s: float = 60.0) -> None:
        self._patience_s = patience_s
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}", "Content-Type": MEDIA_TYPE},
            timeout=httpx.Timeout(10.0, read=MAX_WAIT_S + 20.0),
            trust_env=False,  # a proxy of the environment knows nothing of this machine's own ports
        )

    async def lease(self, worker: str, instance: str, num: int, wait_s: float) -> list[Attempt]:
        request = uuid.uuid4().hex
        deadline_s = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            call = LeaseCall(worker=worker, instance=instance, num=num, wait_s=min(left_s, MAX_WAIT_S), request=request)
            found = await self._call("/lease", call, list[Attempt])
            if found or left_s <= MAX_WAIT_S:
                return found

    async def renew(self, worker: str, instance: str, lease_ids: Sequence[str]) -> list[str]:
        return await self._call(
            "/renew", RenewCall(worker=worker, instance=instance, lease_ids=list(lease_ids)), list[str]
        )

    async def complete(self, result: AttemptResult) -> bool:
        return await self._call("/complete", result, bool)

    async def batch(self, index: int, wait_s: float) -> Batch | None:
        deadline_s = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            kind: Any = Batch | None
            found: Batch | None = await self._call(
                "/batch", BatchCall(index=index, wait_s=min(left_s, MAX_WAIT_S)), kind
            )
            if found is not None or left_s <= MAX_WAIT_S:
                return found

    async def demonstrations(self, wait_s: float) -> list[AttemptResult] | None:
        deadline_s = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            kind: Any = list[AttemptResult] | None
            found: list[AttemptResult] | None = await self._call(
                "/demonstrations", DemonstrationsCall(wait_s=min(left_s, MAX_WAIT_S)), kind
            )
            if found is not None or left_s <= MAX_WAIT_S:
                return found

    async def halt(self, cause: str) -> None:
        await self._call("/halt", HaltCall(cause=cause), type(None))

    async def status(self) -> RunStatus:
        return await self._call("/status", StatusCall(), RunStatus)

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, path: str, call: Record, kind: type[T]) -> T:
        body = encode(call)
        backoff_s = FIRST_BACKOFF_S
        gone_since_s: float | None = None
        while True:
            try:
                response = await self._http.post(path, content=body)
            except httpx.TransportError as error:
                now_s = time.monotonic()
                gone_since_s = now_s if gone_since_s is None else gone_since_s
                if now_s - gone_since_s >= self._patience_s:
                    raise CoordinatorUnavailable(
                        f"the coordinator at {self._http.base_url} has been away for {self._patience_s:.0f} s "
                        f"({type(error).__name__}): see its log, or start the run again"
                    ) from error
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
                continue
            if response.status_code == httpx.codes.OK:
                return msgspec.msgpack.decode(response.content, type=kind)
            raise _error(response)


def _error(response: httpx.Response) -> Exception:
    try:
        failure = msgspec.msgpack.decode(response.content, type=Failure)
    except msgspec.DecodeError:
        return CoordinatorError(f"the coordinator answered {response.status_code}: see its log")
    if failure.kind == "halted":
        return TrainingHalted(failure.message)
    return CoordinatorError(failure.message)
