"""One suite over the coordinator itself and over its HTTP client."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx
import msgspec
import pytest
import uvicorn

from support.coordinator_world import World, identity, world
from tidemill.batches.client import HttpCoordinator
from tidemill.batches.http import coordinator_server
from tidemill.batches.schema import Identity
from tidemill.core.errors import CoordinatorError, CoordinatorUnavailable, TrainingHalted
from tidemill.core.records import Attempt, AttemptResult, Batch, digest
from tidemill.core.seams import Coordinator

TOKEN = "open sesame"


@dataclass
class Bench:
    coordinator: Coordinator
    world: World


@contextlib.asynccontextmanager
async def served(small: World) -> AsyncIterator[tuple[uvicorn.Server, str]]:
    server = coordinator_server(small.coordinator, TOKEN, port=0)
    task = asyncio.create_task(server.serve())
    async with asyncio.timeout(20):
        while not server.started:
            await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@pytest.fixture(params=["journal", "http"])
def bench(request: pytest.FixtureRequest) -> Callable[[Identity, Callable[[Bench], Awaitable[None]]], None]:
    """Runs a test's coroutine against one implementation."""

    async def over_http(small: World, body: Callable[[Bench], Awaitable[None]]) -> None:
        async with served(small) as (_, url):
            client = HttpCoordinator(url, TOKEN, patience_s=5.0)
            try:
                await body(Bench(coordinator=client, world=small))
            finally:
                await client.close()

    async def direct(small: World, body: Callable[[Bench], Awaitable[None]]) -> None:
        await body(Bench(coordinator=small.coordinator, world=small))

    def run(who: Identity, body: Callable[[Bench], Awaitable[None]]) -> None:
        with world(who) as small:
            asyncio.run((over_http if request.param == "http" else direct)(small, body))

    return run


Run = Callable[[Identity, Callable[[Bench], Awaitable[None]]], None]


async def finish(at: Bench, attempts: list[Attempt], reward: float = 0.0) -> None:
    for attempt in attempts:
        assert await at.coordinator.complete(at.world.result(attempt, reward=reward))


def test_a_run_from_demonstrations_to_its_last_update(bench: Run) -> None:
    async def body(at: Bench) -> None:
        c, store = at.coordinator, at.world.store
        demos = await c.lease("w", "1", 10, 0.0)
        assert [a.stage for a in demos] == ["sft"] * 4
        assert await c.demonstrations(0.0) is None
        await finish(at, list(reversed(demos)))
        results = await c.demonstrations(0.0)
        assert results is not None
        assert [r.attempt_id for r in results] == [a.id for a in demos]
        assert await c.lease("w", "1", 1, 0.0) == [], "RL waits for version 0"
        assert (await c.status()).stage == "sft"
        store.publish(None)
        for index in range(3):
            assert (await c.status()).version == index
            attempts = await c.lease("w", "1", 100, 0.0)
            await finish(at, attempts, reward=1.0)
            batch = await c.batch(index, 0.0)
            assert batch is not None and len(batch.items) == 4
            again = await c.batch(index, 0.0)
            assert again is not None and digest(again) == digest(batch)
            assert await c.batch((index + 1) % 3, 0.0) is None or index == 2
            store.publish(batch)
        status = await c.status()
        assert status.finished and status.version == 3 and status.halted == ""
        assert (status.accepted, status.trained, status.queued, status.rejected) == (12, 12, 0, 0)
        assert await c.lease("w", "1", 1, 0.0) == []

    bench(identity(sft=2, num_demonstrations_per_task=2), body)


def test_whole_groups_one_after_another_with_seeds_of_their_own(bench: Run) -> None:
    async def body(at: Bench) -> None:
        at.world.store.publish(None)
        attempts = [(await at.coordinator.lease("w", "1", 1, 0.0))[0] for _ in range(8)]
        assert [a.task_id for a in attempts] == [f"task-{i // 2}" for i in range(8)]
        assert len({a.group_id for a in attempts}) == 4
        assert len({a.seed for a in attempts}) == 8
        assert all(a.min_version == 0 and a.try_index == 0 for a in attempts)
        assert await at.coordinator.lease("w", "1", 1, 0.0) == [], "(0 + 1 + 1) * 2 groups at version 0"

    bench(identity(), body)


def test_advantages_and_order_in_a_batch(bench: Run) -> None:
    async def body(at: Bench) -> None:
        at.world.store.publish(None)
        attempts = await at.coordinator.lease("w", "1", 4, 0.0)
        for attempt, reward in zip(reversed(attempts), [0.0, 1.0, 0.5, 0.5], strict=True):
            await finish(at, [attempt], reward)
        batch = await at.coordinator.batch(0, 0.0)
        assert batch is not None
        assert [i.attempt_id for i in batch.items] == [a.id for a in attempts]
        assert [i.reward for i in batch.items] == [0.5, 0.5, 1.0, 0.0]
        assert [i.advantage for i in batch.items] == [0.0, 0.0, 0.5, -0.5]

    bench(identity(max_age=0), body)


def test_an_env_fault_is_issued_again_then_rejects_its_group(bench: Run) -> None:
    async def body(at: Bench) -> None:
        c = at.coordinator
        at.world.store.publish(None)
        first, second, *_ = await c.lease("w", "1", 4, 0.0)
        await finish(at, [second])
        fault = at.world.fault(first)
        assert await c.complete(fault) and await c.complete(fault), "told twice"
        (again,) = await c.lease("w", "1", 1, 0.0)
        assert (again.id, again.seed, again.try_index) == (first.id, first.seed, 1)
        assert again.lease_id != first.lease_id
        assert not await c.complete(at.world.result(first)), "the first lease is over"
        last = at.world.fault(again)
        assert await c.complete(last) and await c.complete(last)
        status = await c.status()
        assert (status.accepted, status.rejected, status.queued) == (2, 2, 0)
        (replacement, _) = await c.lease("w", "1", 2, 0.0)
        assert replacement.task_id == "task-2", "its place is free for the next task"

    bench(identity(max_age=0), body)


def test_a_worker_started_again_gets_its_attempts_back_at_once(bench: Run) -> None:
    async def body(at: Bench) -> None:
        c = at.coordinator
        at.world.store.publish(None)
        old = await c.lease("w", "old", 2, 0.0)
        other = await c.lease("v", "1", 1, 0.0)
        new = await c.lease("w", "new", 2, 0.0)
        assert [a.id for a in new] == [a.id for a in old]
        assert await c.renew("w", "old", [a.lease_id for a in old]) == []
        assert not await c.complete(at.world.result(old[0]))
        with pytest.raises(CoordinatorError, match="started again"):
            await c.lease("w", "old", 1, 0.0)
        held = [a.lease_id for a in new + other]
        assert await c.renew("w", "new", held) == held[:2], "another worker's lease is not ours to renew"

    bench(identity(), body)


def test_a_lease_that_is_not_renewed_goes_to_another(bench: Run) -> None:
    async def body(at: Bench) -> None:
        c = at.coordinator
        at.world.store.publish(None)
        kept, lost = await c.lease("slow", "1", 2, 0.0)
        at.world.clock.now_s += 8
        assert await c.renew("slow", "1", [kept.lease_id]) == [kept.lease_id]
        at.world.clock.now_s += 8
        (taken,) = await c.lease("quick", "1", 1, 0.0)
        assert taken.id == lost.id
        assert not await c.complete(at.world.result(lost))
        assert await c.complete(at.world.result(kept))
        assert await c.complete(at.world.result(taken))

    bench(identity(), body)


def test_a_late_result_is_taken_while_nobody_else_works_on_it(bench: Run) -> None:
    async def body(at: Bench) -> None:
        at.world.store.publish(None)
        (attempt,) = await at.coordinator.lease("w", "1", 1, 0.0)
        at.world.clock.now_s += 1000
        assert await at.coordinator.complete(at.world.result(attempt))

    bench(identity(), body)


def test_results_that_cannot_be_are_refused(bench: Run) -> None:
    async def body(at: Bench) -> None:
        c = at.coordinator
        at.world.store.publish(None)
        (attempt,) = await c.lease("w", "1", 1, 0.0)
        good = at.world.result(attempt)
        for change, message in [
            ({"episode": None}, "names no episode"),
            ({"episode": "0" * 64}, "upload it"),
            ({"reward": float("nan")}, "not finite"),
            ({"oldest_version": 3, "newest_version": 2}, "oldest to newest"),
            ({"attempt_id": "rl-7-7"}, "no attempt rl-7-7"),
        ]:
            with pytest.raises(CoordinatorError, match=message):
                await c.complete(msgspec.structs.replace(good, **change))
        assert await c.complete(good)
        assert not await c.complete(msgspec.structs.replace(good, reward=1.0)), "the first one stands"

    bench(identity(), body)


def test_a_wait_ends_when_there_is_something(bench: Run) -> None:
    async def body(at: Bench) -> None:
        c = at.coordinator
        waiting = asyncio.create_task(c.lease("w", "1", 4, 20.0))
        await asyncio.sleep(0)
        at.world.store.publish(None)
        attempts = await waiting
        assert len(attempts) == 4
        batch = asyncio.create_task(c.batch(0, 20.0))
        await finish(at, attempts)
        started = time.monotonic()
        found = await batch
        assert isinstance(found, Batch) and time.monotonic() - started < 5

    bench(identity(max_age=0), body)


def test_a_halt_stops_everyone_with_its_first_cause(bench: Run) -> None:
    async def body(at: Bench) -> None:
        c = at.coordinator
        at.world.store.publish(None)
        (attempt,) = await c.lease("w", "1", 1, 0.0)
        waiting = asyncio.create_task(c.batch(0, 20.0))
        await asyncio.sleep(0.05)
        await c.halt("the loss is NaN at update 0")
        await c.halt("because of that")
        with pytest.raises(TrainingHalted, match="the loss is NaN"):
            await waiting
        with pytest.raises(TrainingHalted, match="the loss is NaN"):
            await c.lease("w", "1", 1, 0.0)
        assert (await c.status()).halted == "the loss is NaN at update 0"
        assert await c.complete(at.world.result(attempt)), "what was done is kept"
        at.world.coordinator.clear_halt()
        assert len(await c.lease("w", "1", 1, 0.0)) == 1

    bench(identity(), body)


def test_a_store_of_another_run_halts(bench: Run) -> None:
    async def body(at: Bench) -> None:
        c = at.coordinator
        at.world.store.publish(None)
        await finish(at, await c.lease("w", "1", 4, 0.0))
        assert await c.batch(0, 0.0) is not None
        at.world.store.publish("f" * 64)
        with pytest.raises(TrainingHalted, match="two runs share this store"):
            await c.batch(1, 0.0)
        assert "version 1" in (await c.status()).halted

    bench(identity(), body)


def test_nonsense_is_refused(bench: Run) -> None:
    async def body(at: Bench) -> None:
        with pytest.raises(CoordinatorError, match="batches 0 to 2"):
            await at.coordinator.batch(3, 0.0)
        with pytest.raises(CoordinatorError, match="at least 1"):
            await at.coordinator.lease("w", "1", 0, 0.0)

    bench(identity(), body)


# --- the wire alone ------------------------------------------------------------------------------------------


def over_wire(body: Callable[[World, uvicorn.Server, str], Awaitable[None]]) -> None:
    async def run(small: World) -> None:
        async with served(small) as (server, url):
            await body(small, server, url)

    with world() as small:
        asyncio.run(run(small))


def test_only_with_the_token_and_only_small_bodies() -> None:
    async def body(small: World, server: uvicorn.Server, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            assert (await http.post("/status", content=b"\x80")).status_code == 401
            wrong = {"Authorization": "Bearer wrong"}
            assert (await http.post("/status", content=b"\x80", headers=wrong)).status_code == 401
            right = {"Authorization": f"Bearer {TOKEN}"}
            assert (await http.post("/status", content=b"\x80", headers=right)).status_code == 200
            assert (await http.post("/status", content=b"x" * (2 << 20), headers=right)).status_code == 413
            assert (await http.post("/lease", content=b"\x80", headers=right)).status_code == 400
        stranger = HttpCoordinator(url, "wrong")
        with pytest.raises(CoordinatorError, match="token"):
            await stranger.status()
        await stranger.close()

    over_wire(body)


def test_a_repeated_lease_call_is_given_the_same_attempts() -> None:
    with world() as small:
        small.store.publish(None)
        first = asyncio.run(small.coordinator.lease("w", "1", 3, 0.0, request="call-1"))
        again = asyncio.run(small.coordinator.lease("w", "1", 3, 0.0, request="call-1"))
        assert [a.lease_id for a in again] == [a.lease_id for a in first]


def test_nothing_is_leased_to_a_caller_who_hung_up() -> None:
    async def body(small: World, server: uvicorn.Server, url: str) -> None:
        client = HttpCoordinator(url, TOKEN)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.lease("w", "1", 1, 20.0), 0.2)
        await client.close()
        async with asyncio.timeout(10):
            while server.server_state.tasks:
                await asyncio.sleep(0.01)
        small.store.publish(None)
        assert len(await small.coordinator.lease("v", "1", 8, 0.0)) == 8

    over_wire(body)


def test_long_polls_end_with_the_server() -> None:
    async def body(small: World, server: uvicorn.Server, url: str) -> None:
        client = HttpCoordinator(url, TOKEN, patience_s=0.2)
        waiting = asyncio.create_task(client.lease("w", "1", 1, 25.0))
        async with asyncio.timeout(10):
            while not server.server_state.tasks:
                await asyncio.sleep(0.01)
        started = time.monotonic()
        server.should_exit = True
        assert await waiting == []
        assert time.monotonic() - started < 3
        with pytest.raises(CoordinatorUnavailable, match="away"):
            async with asyncio.timeout(10):
                while True:
                    await client.status()
        await client.close()

    over_wire(body)


def test_a_caller_outlives_a_restart_of_the_server() -> None:
    async def run(small: World) -> None:
        async with served(small) as (_, url):
            client = HttpCoordinator(url, TOKEN, patience_s=20.0)
            await client.status()
        asking = asyncio.create_task(client.lease("w", "1", 2, 5.0))
        await asyncio.sleep(0.1)
        small.restart()
        small.store.publish(None)
        server = coordinator_server(small.coordinator, TOKEN, port=int(url.rsplit(":", 1)[1]))
        task = asyncio.create_task(server.serve())
        attempts = await asking
        assert len(attempts) == 2
        result: AttemptResult = small.result(attempts[0])
        assert await client.complete(result)
        await client.close()
        server.should_exit = True
        await task

    with world() as small:
        asyncio.run(run(small))
