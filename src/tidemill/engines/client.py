"""Engines elsewhere: one over HTTP, and several behind one face."""

import hashlib
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import cast, final
from urllib.parse import urlsplit

import httpx
import msgspec

from tidemill.core.errors import EngineError, EngineUnavailable, RequestRefused
from tidemill.core.records import encode
from tidemill.core.seams import Chunk, Engine, EngineStatus, GenerationRequest
from tidemill.engines.wire import KEEP_ALIVE_S, read_chunks

_AWAY_S = 2.0
"""How long a fleet passes over an engine that did not answer."""


@final
class HttpEngine:
    """An engine behind `engines.http.engine_app`. Use it within one event loop."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        local = parts.hostname in ("127.0.0.1", "localhost", "::1")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {token}"},
            # Three signs of life may be lost before an engine counts as gone.
            timeout=httpx.Timeout(connect=5.0, read=4 * KEEP_ALIVE_S, write=30.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=not local,
            verify=True if parts.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        try:
            async with self._client.stream("POST", "/generate", content=encode(request)) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._raise_for(response)
                chunks = cast(AsyncGenerator[Chunk, None], read_chunks(response.aiter_raw()))
                async with aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk
        except (httpx.TransportError, httpx.StreamError) as error:
            raise EngineUnavailable(f"{self.url} went away: {type(error).__name__}: {error}") from error

    async def status(self) -> EngineStatus:
        try:
            response = await self._client.get("/status")
        except httpx.TransportError as error:
            raise EngineUnavailable(f"{self.url} went away: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            self._raise_for(response)
        try:
            return msgspec.json.decode(response.content, type=EngineStatus)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self.url} gave no engine status ({error}): is another service there?") from None

    async def close(self) -> None:
        await self._client.aclose()

    def _raise_for(self, response: httpx.Response) -> None:
        says = response.text[:500]
        if response.status_code in (400, 413, 422):
            raise RequestRefused(says)
        if response.status_code == 401:
            raise EngineError(f"{self.url} refused the access token: give the one of this run")
        if response.status_code == 500:
            raise EngineError(f"{self.url} failed: {says}")
        raise EngineUnavailable(f"{self.url} answers {response.status_code}: {says}")


@final
class Fleet:
    """Several engines as one: a session stays with one engine while that one answers."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ValueError("a fleet of no engines: give at least one")
        self._engines = list(engines)
        self._away_until = [0.0] * len(engines)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        failure: EngineUnavailable | None = None
        for index in self._order(request.session):
            started = False
            chunks = cast(AsyncGenerator[Chunk, None], self._engines[index].generate(request))
            try:
                async with aclosing(chunks):
                    async for chunk in chunks:
                        started = True
                        yield chunk
                return
            except EngineUnavailable as error:
                self._away_until[index] = time.monotonic() + _AWAY_S
                if started:
                    raise
                failure = error
        assert failure is not None, "every engine was tried"
        raise failure

    def _order(self, session: str) -> list[int]:
        """Engines in order of choice: by rendezvous hashing (Thaler and Ravishankar 1998), those away last."""
        now = time.monotonic()
        weight = {
            index: hashlib.blake2b(f"{index}/{session}".encode(), digest_size=8).digest()
            for index in range(len(self._engines))
        }
        return sorted(weight, key=lambda index: (self._away_until[index] > now, weight[index]))

    async def statuses(self) -> list[EngineStatus | None]:
        """Of each engine; None for one that is away."""
        found: list[EngineStatus | None] = []
        for engine in self._engines:
            try:
                found.append(await engine.status())
            except EngineUnavailable:
                found.append(None)
        return found

    async def status(self) -> EngineStatus:
        """Sums over the engines that answer; the version is the oldest among them."""
        found = [status for status in await self.statuses() if status is not None]
        if not found:
            raise EngineUnavailable("none of the engines answers")
        slowest = min(found, key=lambda status: status.version)
        return EngineStatus(
            name="fleet",
            version=slowest.version,
            stage=slowest.stage,
            running=sum(status.running for status in found),
            waiting=sum(status.waiting for status in found),
            prefill_tokens=sum(status.prefill_tokens for status in found),
            sampled_tokens=sum(status.sampled_tokens for status in found),
            num_swaps=min(status.num_swaps for status in found),
            last_swap_s=slowest.last_swap_s,
            refused_loads=sum(status.refused_loads for status in found),
        )

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()
