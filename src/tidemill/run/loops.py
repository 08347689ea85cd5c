"""The loops of the five services. Read this file first.

      tasks ──► episodes ──► trajectories ──► batches ──► updates ──► weights ──► engines ──┐
                   ▲                                                                        │
                   └───────── token ids · logprobs · routes · policy versions ◄─────────────┘

Two buildings that never wait for each other longer than the bound on staleness asks: rollouts (worker, engine,
coordinator) and the learner. Each loop below runs in a process of its own, may be killed at any instant and started
again, alone: what is true lies in the journal, the blobs and the store.

| loop     | process     | waits for                                       | is unblocked by                      |
|----------|-------------|-------------------------------------------------|--------------------------------------|
| answer   | coordinator | a question                                      | whoever asks: worker, learner, run   |
| work     | worker × N  | a free slot; then a lease: at most `max_age` +1 | an episode that ends; a version that |
|          |             | batches may be under way beyond the learner     | the learner publishes                |
| follow   | engine × N  | requests; a newer version in the store          | workers; the learner's publication   |
| learn    | learner     | batch k: whole groups, first those that would   | the coordinator, when the last       |
|          |             | expire                                          | episode of batch k is in             |
| evaluate | evaluator   | a version that is to be examined                | the learner's publication            |

A loop that raises ends its process with the cause; the supervisor starts the process again, or stops the run.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tidemill.core.errors import TrainingHalted, VersionTaken
from tidemill.core.events import EventLog
from tidemill.core.metrics import MetricsLog
from tidemill.core.records import Attempt, AttemptResult, Batch, Trajectory, digest
from tidemill.core.seams import Coordinator, Store, Weights

POLL_S = 0.2
LEASE_WAIT_S = 5.0


# --- rollouts ------------------------------------------------------------------------------------------------


async def work(
    coordinator: Coordinator,
    attempt: Callable[[Attempt], Awaitable[AttemptResult]],
    *,
    worker: str,
    instance: str,
    num_slots: int,
    renew_s: float,
    events: EventLog,
) -> None:
    """Lease attempts, run up to `num_slots` episodes at once, return their results. Runs until it is cancelled."""
    running: dict[str, asyncio.Task[None]] = {}
    slot_freed = asyncio.Event()

    async def one(lease: Attempt) -> None:
        try:
            await coordinator.complete(await attempt(lease))
        finally:
            del running[lease.lease_id]
            slot_freed.set()

    async def renew() -> None:
        while True:
            await asyncio.sleep(renew_s)
            held = list(running)
            standing = set(await coordinator.renew(worker, instance, held))
            for lease_id in held:
                if lease_id not in standing and lease_id in running:
                    running[lease_id].cancel()

    async with asyncio.TaskGroup() as group:
        group.create_task(renew())
        while True:
            slot_freed.clear()
            num_free = num_slots - len(running)
            if num_free == 0:
                await slot_freed.wait()
                continue
            start = time.time()
            leases = await coordinator.lease(worker, instance, num_free, LEASE_WAIT_S)
            events.write(
                "wait",
                from_s=start,
                numbers={"free": num_free, "slots": num_slots, "leased": len(leases)},
                note="lease",
            )
            for lease in leases:
                running[lease.lease_id] = group.create_task(one(lease))


# --- learner -------------------------------------------------------------------------------------------------


class Trainer(Protocol):
    """What the learner's loop asks of `updates.learner.Learner`."""

    version: int
    step: int

    def train_batch(self, batch: Batch, trajectories: Mapping[str, Sequence[Trajectory]]) -> dict[str, float]: ...

    def weights(self, tokenizer: Mapping[str, bytes]) -> Weights: ...

    def save(self, folder: Path) -> None: ...


async def learn(
    trainer: Trainer,
    coordinator: Coordinator,
    store: Store,
    trajectories: Callable[[Batch], dict[str, list[Trajectory]]],
    *,
    run_id: str,
    tokenizer: Mapping[str, bytes],
    num_updates: int,
    save_every: int,
    checkpoints: Path,
    metrics: MetricsLog,
    events: EventLog,
) -> None:
    """Train batch after batch, from the trainer's version to the last one, and publish each.

    A trainer that was resumed behind the store's head redoes the batches in between: they are immutable, so the same
    weights must come out, and `publish` is the proof. Anything else halts the run.
    """
    while trainer.version < num_updates:
        version = trainer.version
        start = time.time()
        while (batch := await coordinator.batch(version, LEASE_WAIT_S)) is None:
            pass
        events.write("wait", from_s=start, version=version, note="batch")
        name = digest(batch)
        with events.span("update", version=version, ids={"batch": name}) as numbers:
            numbers.update(trainer.train_batch(batch, trajectories(batch)))
        publish(trainer, store, tokenizer, version=version + 1, batch=name, run_id=run_id, events=events)
        metrics.write({"stage": "rl", "step": trainer.step, "version": version + 1, "time_s": time.time(), **numbers})
        if trainer.version % save_every == 0 or trainer.version == num_updates:
            with events.span("checkpoint", version=trainer.version):
                trainer.save(checkpoints)


def publish(
    trainer: Trainer,
    store: Store,
    tokenizer: Mapping[str, bytes],
    *,
    version: int,
    batch: str | None,
    run_id: str,
    events: EventLog,
) -> None:
    """The only commit of a version. Raises `TrainingHalted` where the store holds another version of that number."""
    with events.span("publish", version=version) as numbers:
        try:
            snapshot = store.publish(
                trainer.weights(tokenizer), version=version, batch=batch, step=trainer.step, run_id=run_id
            )
        except VersionTaken as error:
            raise TrainingHalted(
                f"version {version} was published by another learner, or a redo differs: {error}"
            ) from error
        numbers["bytes"] = snapshot.num_bytes


# --- versions ------------------------------------------------------------------------------------------------


async def next_version(store: Store, wanted: int) -> int:
    """Wait for version `wanted` or a later one; returns the newest."""
    while True:
        head = store.head()
        if head is not None and head >= wanted:
            return head
        await asyncio.sleep(POLL_S)


async def evaluate(
    store: Store,
    examine: Callable[[int], Awaitable[None]],
    *,
    versions: Sequence[int],
    events: EventLog,
) -> None:
    """Examine each of `versions`, in order, when it is there. `examine` skips what it has already written down."""
    for version in versions:
        await next_version(store, version)
        with events.span("evaluate", version=version):
            await examine(version)
