"""The coordinator: leases attempts to workers, gathers whole groups into batches, and trusts only journal and store.

| call             | waits for                                  | unblocked by                                        |
|------------------|--------------------------------------------|-----------------------------------------------------|
| `lease`          | an attempt that may be issued              | a new version, a lost lease, a rejected group       |
| `batch`          | version k, then the groups that must be in | the learner's own publishing, then `complete`       |
| `demonstrations` | every attempt of the SFT stage             | `complete`                                          |

Everything runs in one thread: a transition is never interleaved with another.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar, final

from tidemill.batches.admission import compose
from tidemill.batches.advantages import shuffled_rewards, task_advantages
from tidemill.batches.backup import backup_journal
from tidemill.batches.journal import JournalWriter
from tidemill.batches.schema import Identity
from tidemill.core.blobs import get_record, put_record
from tidemill.core.errors import CoordinatorError, TrainingHalted
from tidemill.core.events import EventLog
from tidemill.core.journal import BatchRow
from tidemill.core.records import Attempt, AttemptResult, Batch, BatchItem, digest
from tidemill.core.seams import Blobs, RunStatus, Store

RECHECK_S = 0.5
"""The store changes without telling us, and leases run out with time: how often a waiting call looks."""

T = TypeVar("T")


@final
class JournalCoordinator:
    """`core.seams.Coordinator` over a journal, the blobs and the store."""

    def __init__(
        self,
        journal: Path,
        identity: Identity,
        *,
        blobs: Blobs,
        store: Store,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open or create the journal. Leases given before a restart stand for another `lease_s`."""
        self.config = identity.config
        self._run_id = identity.run_id
        self._journal = JournalWriter(journal, identity)
        self._blobs = blobs
        self._store = store
        self._events = events
        self._clock = clock
        self._waiters: set[asyncio.Future[None]] = set()
        self._closing = False
        self._checked = 0
        """Versions up to here carry the digest of their batch. Both are immutable, so this needs asking once."""
        self._journal.prolong_all(now_s=clock())

    # --- the seam --------------------------------------------------------------------------------------------

    async def lease(
        self, worker: str, instance: str, num: int, wait_s: float, *, request: str | None = None
    ) -> list[Attempt]:
        """See `Coordinator.lease`. A caller that may have to repeat itself names its `request`: the repetition
        returns the attempts that the first one was given. Raises `TrainingHalted` where the run was stopped."""
        if num < 1:
            raise CoordinatorError(f"a lease of {num} attempts: ask for at least 1")
        name = request or uuid.uuid4().hex

        def take() -> list[Attempt] | None:
            self._refuse_when_halted()
            version = self._version()
            if version is not None and version >= self.config.num_updates:
                return None
            attempts = self._journal.lease(
                worker,
                instance,
                num,
                stage="sft" if version is None else "rl",
                version=-1 if version is None else version,
                request=name,
                now_s=self._clock(),
            )
            return attempts or None

        return await self._until(wait_s, take) or []

    async def renew(self, worker: str, instance: str, lease_ids: Sequence[str]) -> list[str]:
        return self._journal.renew(worker, instance, lease_ids, now_s=self._clock())

    async def complete(self, result: AttemptResult) -> bool:
        """See `Coordinator.complete`. Raises `CoordinatorError` for a result that can never be taken."""
        if result.outcome != "env_fault":
            if result.episode is None:
                raise CoordinatorError(f"result of {result.attempt_id} names no episode: only an env_fault may")
            if not self._blobs.has(result.episode):
                raise CoordinatorError(f"episode {result.episode} is not in the blobs: upload it before completing")
        if not abs(result.reward) < float("inf"):
            raise CoordinatorError(f"reward {result.reward} of {result.attempt_id} is not finite: mend the environment")
        if not -1 <= result.oldest_version <= result.newest_version:
            raise CoordinatorError(
                f"versions {result.oldest_version}..{result.newest_version} of {result.attempt_id}: oldest to newest, "
                f"-1 where nothing was sampled"
            )
        taken = self._journal.complete(result, now_s=self._clock())
        self._wake()
        return taken

    async def batch(self, index: int, wait_s: float) -> Batch | None:
        """See `Coordinator.batch`. It is put together when version `index` exists and the learner asks, so that it
        holds the freshest that is there. Raises `TrainingHalted` where the run was stopped."""
        if not 0 <= index < self.config.num_updates:
            raise CoordinatorError(f"batch {index}: the run has batches 0 to {self.config.num_updates - 1}")

        def find() -> Batch | None:
            self._refuse_when_halted()
            version = self._version()
            rows = self._journal.batches()
            if index < len(rows):
                return self._load(rows[index])
            return self._compose(index) if version == index else None

        return await self._until(wait_s, find)

    async def demonstrations(self, wait_s: float) -> list[AttemptResult] | None:
        """See `Coordinator.demonstrations`; attempts that used up their tries are not among them."""

        def find() -> list[AttemptResult] | None:
            self._refuse_when_halted()
            return self._journal.demonstrations()

        return await self._until(wait_s, find)

    async def halt(self, cause: str) -> None:
        self._halt(cause)

    async def status(self) -> RunStatus:
        """Counts are attempts of the current stage; accepted = trained + queued + rejected."""
        with suppress(TrainingHalted):  # told below, as `halted`
            self._version()
        version = self._store.head()
        counts = self._journal.counts("sft" if version is None else "rl", num_trained=version or 0)
        return RunStatus(
            run_id=self._run_id,
            stage="sft" if version is None else "rl",
            version=-1 if version is None else version,
            num_updates=self.config.num_updates,
            issued=counts.issued,
            accepted=counts.accepted,
            trained=counts.trained,
            queued=counts.queued,
            rejected=counts.rejected,
            leased=counts.leased,
            finished=version is not None and version >= self.config.num_updates,
            halted=self._journal.halted(),
        )

    # --- for the service that owns it ------------------------------------------------------------------------

    def clear_halt(self) -> None:
        """The user has started a stopped run again."""
        self._journal.clear_halt()

    async def backup(self, to: Blobs) -> str:
        """Copy the journal into blobs, as it is at one instant, while work goes on; returns the blob's hash."""
        return await asyncio.to_thread(backup_journal, self._journal.path, to)

    def end_polls(self) -> None:
        """Calls that wait return at once, empty; a server says so before it waits for its connections."""
        self._closing = True
        self._wake()

    def close(self) -> None:
        self.end_polls()
        self._journal.close()

    # --- inside ----------------------------------------------------------------------------------------------

    def _version(self) -> int | None:
        """The learner's version, from the store's manifests, after checking that they were made of our batches."""
        head = self._store.head()
        batches = self._journal.batches()
        for version in range(self._checked + 1, (head or 0) + 1):
            carried = self._store.manifest(version).batch
            own = batches[version - 1].digest if version <= len(batches) else None
            if carried is None or carried != own:
                self._halt(
                    f"version {version} of the store was made of batch {carried}, but batch {version - 1} of the "
                    f"journal is {own}: two runs share this store, or the journal is older than the store; give the "
                    f"run a store of its own, or restore the journal's newest backup"
                )
                self._refuse_when_halted()
            self._checked = version
        if len(batches) - 1 > (-1 if head is None else head):
            self._halt(
                f"the store ends at version {head}, but batch {len(batches) - 1} was assigned, which needs version "
                f"{len(batches) - 1}: put the store's versions back"
            )
            self._refuse_when_halted()
        return head

    def _compose(self, index: int) -> Batch | None:
        plan = compose(index, self._journal.candidates(), self.config)
        if plan.rejected:
            self._journal.reject(plan.rejected)
            for group_id, reason in plan.rejected.items():
                self._tell("reject", ids={"group": group_id}, note=reason)
            self._wake()
        if plan.chosen is None:
            return None
        return self._assign(index, plan.chosen)

    def _assign(self, index: int, chosen: Sequence[str]) -> Batch:
        """Put the groups into batch `index`, with their advantages, and make it stand."""
        results = [(group_id, result) for group_id in chosen for result in self._journal.group_results(group_id)]
        rewards = [result.reward for _, result in results]
        if self.config.shuffled_rewards:
            rewards = shuffled_rewards(rewards, seed=self._journal.identity.seed, index=index)
        advantages, numbers = task_advantages(rewards, [group_id for group_id, _ in results])
        tasks = {group_id: self._journal.group_task(group_id) for group_id in chosen}
        items: list[BatchItem] = []
        for (group_id, result), advantage in zip(results, advantages, strict=True):
            assert result.episode is not None
            items.append(
                BatchItem(
                    attempt_id=result.attempt_id,
                    group_id=group_id,
                    task_id=tasks[group_id],
                    episode=result.episode,
                    reward=result.reward,
                    advantage=advantage,
                    oldest_version=result.oldest_version,
                )
            )
        assert len(items) == len(chosen) * self.config.group_size, f"batch {index} would split a group"
        batch = Batch(index=index, stage="rl", items=tuple(items), group_size=self.config.group_size)
        name = digest(batch)
        # The blob first: a kill between the two leaves a blob that nobody names, never a row without its batch.
        blob = put_record(self._blobs, batch)
        self._journal.assign(index, digest=name, blob=blob, groups=chosen, now_s=self._clock())
        self._tell("batch", version=index, ids={"batch": name}, numbers=numbers)
        self._wake()
        return batch

    def _load(self, row: BatchRow) -> Batch:
        batch = get_record(self._blobs, row.blob, Batch)
        assert digest(batch) == row.digest, f"batch {row.index} is not the one that was assigned"
        return batch

    def _halt(self, cause: str) -> None:
        self._journal.halt(cause)
        self._tell("fault", note=cause)
        self._wake()

    def _refuse_when_halted(self) -> None:
        if cause := self._journal.halted():
            raise TrainingHalted(cause)

    def _tell(
        self,
        what: str,
        *,
        version: int | None = None,
        ids: dict[str, str] | None = None,
        numbers: dict[str, float] | None = None,
        note: str = "",
    ) -> None:
        if self._events is not None:
            self._events.write(what, version=version, ids=ids, numbers=numbers, note=note)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _until(self, wait_s: float, look: Callable[[], T | None]) -> T | None:
        """The first thing that `look` finds, or None after `wait_s`."""
        deadline_s = time.monotonic() + wait_s
        while True:
            # Made before looking: what happens while a look fails must not be missed.
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                if self._closing:
                    return None
                found = look()
                left_s = deadline_s - time.monotonic()
                if found is not None or left_s <= 0:
                    return found
                await asyncio.wait({waiter}, timeout=min(left_s, RECHECK_S))
            finally:
                self._waiters.discard(waiter)
