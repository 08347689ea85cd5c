"""A small world around a coordinator: a store of bare manifests, workers that make results up, a clock."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidemill.batches.admission import AdmissionConfig
from tidemill.batches.coordinator import JournalCoordinator
from tidemill.batches.schema import Identity
from tidemill.core.blobs import MemoryBlobs, put_record
from tidemill.core.errors import StoreError
from tidemill.core.records import Array, Attempt, AttemptResult, Batch, Segment, Snapshot, digest
from tidemill.core.records import encode as encode_record
from tidemill.core.seams import Blobs
from tidemill.episodes.results import fault_result


class ManifestStore:
    """What the coordinator asks of a store, without weights; on disk where a folder is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.versions: list[Snapshot] = []

    def publish(self, batch: Batch | str | None) -> int:
        version = self.head()
        number = 0 if version is None else version + 1
        name = digest(batch) if isinstance(batch, Batch) else batch
        snapshot = Snapshot(
            version=number,
            kind="full",
            parent=None,
            files={},
            tensors={},
            num_bytes=0,
            batch=name,
            step=number,
            model="",
            run_id="run",
        )
        if self.folder is None:
            self.versions.append(snapshot)
        else:
            temporary = self.folder / f".{number}-{os.getpid()}"
            temporary.write_bytes(encode_record(snapshot))
            os.link(temporary, self.folder / str(number))
            temporary.unlink()
        return number

    def _all(self) -> list[Snapshot]:
        if self.folder is None:
            return self.versions
        from tidemill.core.records import decode

        names = sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdigit())
        return [decode((self.folder / str(name)).read_bytes(), Snapshot) for name in names]

    def head(self) -> int | None:
        return len(self._all()) - 1 if self._all() else None

    def manifest(self, version: int) -> Snapshot:
        try:
            return self._all()[version]
        except IndexError:
            raise StoreError(f"no version {version}") from None


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def config(**changes: object) -> AdmissionConfig:
    values: dict[str, object] = {
        "group_size": 2,
        "groups_per_batch": 2,
        "max_age": 1,
        "num_updates": 3,
        "num_demonstrations_per_task": 0,
        "lease_s": 10.0,
        "max_tries": 2,
    }
    return AdmissionConfig(**{**values, **changes})  # type: ignore[arg-type]


def identity(*, sft: int = 0, rl: int = 50, recipe: str = "recipe", **changes: object) -> Identity:
    return Identity(
        run_id="run",
        recipe=recipe,
        seed=7,
        sft_tasks=tuple(f"demo-{i}" for i in range(sft)),
        rl_tasks=tuple(f"task-{i}" for i in range(rl)),
        config=config(**changes),
    )


class World:
    """A coordinator with everything that it asks for."""

    def __init__(self, journal: Path, who: Identity, store: ManifestStore | None = None) -> None:
        self.journal = journal
        self.identity = who
        self.store = store or ManifestStore()
        self.blobs: Blobs = MemoryBlobs()
        self.clock = Clock()
        self.coordinator = self.open()

    def open(self) -> JournalCoordinator:
        return JournalCoordinator(
            self.journal,
            self.identity,
            blobs=self.blobs,
            store=self.store,  # type: ignore[arg-type]
            clock=self.clock,
        )

    def restart(self) -> None:
        """As after a kill: nothing but the files is left. (The old connection is dropped without ceremony.)"""
        self.coordinator.close()
        self.coordinator = self.open()

    def result(
        self, attempt: Attempt, *, reward: float = 0.0, version: int | None = None, newest: int | None = None
    ) -> AttemptResult:
        return made_up_result(self.blobs, attempt, reward=reward, version=version, newest=newest)

    def fault(self, attempt: Attempt, reason: str = "the disk is full") -> AttemptResult:
        return fault_result(attempt, reason)


def made_up_result(
    blobs: Blobs, attempt: Attempt, *, reward: float = 0.0, version: int | None = None, newest: int | None = None
) -> AttemptResult:
    oldest = max(attempt.min_version, 0) if version is None else version
    # Any record will do as an episode: the coordinator looks at its hash alone.
    episode = put_record(
        blobs, Segment(steps=(), opened_by="start", closing_ids=Array.of([attempt.seed, attempt.try_index], "int64"))
    )
    return AttemptResult(
        attempt_id=attempt.id,
        lease_id=attempt.lease_id,
        episode=episode,
        outcome="submitted",
        reward=reward,
        oldest_version=oldest,
        newest_version=oldest if newest is None else newest,
        sampled_tokens=10,
        total_tokens=20,
    )


@contextmanager
def world(who: Identity | None = None) -> Iterator[World]:
    """In memory-backed files where there are any: the laws make hundreds of journals."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        made = World(Path(folder) / "journal.sqlite", who or identity())
        try:
            yield made
        finally:
            made.coordinator.close()
