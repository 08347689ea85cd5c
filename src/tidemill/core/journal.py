"""The journal as others see it: a read-only view of what the coordinator wrote (`batches.journal` is the writer).

Reports, `status` and tests read it while the coordinator is alive. Everything comes from one read transaction, so that
its rows agree with each other. "Trained" is not here: it is derived from the weight store, whose version `k + 1`
carries the digest of batch `k`.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from tidemill.core.errors import RunFolderError
from tidemill.core.records import Outcome, Record, Stage

SCHEMA_VERSION = 1

GroupState = Literal["open", "complete", "batched", "rejected"]
AttemptState = Literal["free", "leased", "done", "rejected", "cancelled"]
"""`rejected`: it used up its tries. `cancelled`: its group was rejected before it was done."""
LostHow = Literal["env_fault", "expired", "superseded"]


class GroupRow(Record, frozen=True):
    """G attempts at one task."""

    id: str
    stage: Stage
    task_id: str
    position: int
    """In order of issue, within the stage."""
    epoch: int
    size: int
    issued_version: int
    """Learner version at issue; −1 before there was one."""
    issued_at_s: float
    state: GroupState
    batch: int | None
    """Index of the batch that holds it."""
    reason: str
    """Why it was rejected; else empty."""


class AttemptRow(Record, frozen=True):
    id: str
    group_id: str
    index: int
    """Within the group."""
    seed: int
    state: AttemptState
    lease_id: str | None
    """Of the lease that stands, or of the one under which it was done."""
    worker: str | None
    instance: str | None
    leased_at_s: float | None
    lease_until_s: float | None
    tries: int
    """Leases given so far."""
    episode: str | None
    outcome: Outcome | None
    reward: float | None
    oldest_version: int | None
    newest_version: int | None
    sampled_tokens: int | None
    total_tokens: int | None
    done_at_s: float | None
    reason: str


class TryRow(Record, frozen=True):
    """A lease that ended without a result."""

    attempt_id: str
    try_index: int
    lease_id: str
    worker: str
    how: LostHow
    at_s: float
    reason: str


class BatchRow(Record, frozen=True):
    index: int
    digest: str
    """Of the `Batch` record."""
    blob: str
    """Hash of the blob that holds it."""
    assigned_at_s: float


class JournalRows(Record, frozen=True):
    """All of a journal, at one instant."""

    run_id: str
    recipe: str
    """Digest of the recipe."""
    config: dict[str, Any]
    """The admission's configuration."""
    halted: str
    tasks: dict[str, list[str]]
    """Stage → task ids, in order."""
    groups: list[GroupRow]
    attempts: list[AttemptRow]
    """In order of group, then index."""
    tries: list[TryRow]
    batches: list[BatchRow]


def read_journal(path: Path) -> JournalRows:
    """Read a journal that may be in use. Raises `RunFolderError` where there is none, or one of another version."""
    with _connect(path) as connection:
        check_schema(connection, path)
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        tasks: dict[str, list[str]] = {"sft": [], "rl": []}
        for stage, task_id in connection.execute("SELECT stage, task_id FROM tasks ORDER BY stage, position"):
            tasks[stage].append(task_id)
        return JournalRows(
            run_id=meta["run_id"],
            recipe=meta["recipe"],
            config=msgspec.json.decode(meta["config"]),
            halted=meta.get("halted", ""),
            tasks=tasks,
            groups=_rows(connection, GroupRow, "groups", "stage, position"),
            attempts=_rows(
                connection,
                AttemptRow,
                "attempts JOIN (SELECT id AS gid, stage, position FROM groups) ON gid = group_id",
                'stage, position, "index"',
            ),
            tries=_rows(connection, TryRow, "tries", "at_s, attempt_id"),
            batches=_rows(connection, BatchRow, "batches", '"index"'),
        )


class JournalCounts(Record, frozen=True):
    """How a run stands, counted by the database: what can be asked every second of a journal of any length."""

    run_id: str
    config: dict[str, Any]
    halted: str
    demonstrations: tuple[int, int]
    """Done, of how many."""
    accepted: int
    """Finished attempts of the RL stage: trained + queued + rejected."""
    trained: int
    queued: int
    rejected: int
    leased: int
    recent_tokens: int
    """Sampled by attempts that ended at `since_s` or later."""


def read_counts(path: Path, *, head: int, since_s: float) -> JournalCounts:
    """Count a journal that may be in use. `head`: the newest published version; −1: none. Raises as `read_journal`."""
    query = """
        SELECT g.stage, a.state = 'leased', a.outcome IS NOT NULL, g.state = 'rejected',
               coalesce(g.batch < ?, FALSE), count(*),
               coalesce(sum(CASE WHEN a.done_at_s >= ? THEN a.sampled_tokens END), 0)
        FROM attempts a JOIN groups g ON g.id = a.group_id GROUP BY 1, 2, 3, 4, 5
    """
    counted = dict.fromkeys(("sft", "shown", "accepted", "trained", "queued", "rejected", "leased", "tokens"), 0)
    with _connect(path) as connection:
        check_schema(connection, path)
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        rows = connection.execute(query, (head, since_s)).fetchall()
    for stage, is_leased, is_done, is_rejected, is_trained, num, num_tokens in rows:
        counted["tokens"] += num_tokens
        if stage == "sft":
            counted["sft"] += num
            counted["shown"] += num * is_done
            continue
        counted["leased"] += num * is_leased
        if is_done:
            counted["accepted"] += num
            counted["trained" if is_trained else "rejected" if is_rejected else "queued"] += num
    return JournalCounts(
        run_id=meta["run_id"],
        config=msgspec.json.decode(meta["config"]),
        halted=meta.get("halted", ""),
        demonstrations=(counted["shown"], counted["sft"]),
        accepted=counted["accepted"],
        trained=counted["trained"],
        queued=counted["queued"],
        rejected=counted["rejected"],
        leased=counted["leased"],
        recent_tokens=counted["tokens"],
    )


def check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raises `RunFolderError` where the file is no journal of this version."""
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    except sqlite3.DatabaseError as error:
        raise RunFolderError(
            f"{path} is no journal ({error}): restore it from its backup, or start in a new folder"
        ) from error
    found = None if row is None else row[0]
    if found != str(SCHEMA_VERSION):
        raise RunFolderError(
            f"{path} has journal schema {found}, this Tidemill reads {SCHEMA_VERSION}: use the Tidemill that made it"
        )


T = TypeVar("T", bound=Record)


def _rows(connection: sqlite3.Connection, kind: type[T], source: str, order: str) -> list[T]:
    names = kind.__struct_fields__
    columns = ", ".join(f'"{name}"' for name in names)
    found = connection.execute(f"SELECT {columns} FROM {source} ORDER BY {order}").fetchall()
    return [msgspec.convert(dict(zip(names, row, strict=True)), kind) for row in found]


@contextmanager
def _connect(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.is_file():
        raise RunFolderError(f"there is no journal at {path}: is this the folder of a run?")
    uri = f"{path.resolve().as_uri()}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    try:
        connection.execute("PRAGMA busy_timeout = 10000")
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        # A copy in a folder that cannot be written: nobody writes it, and only `immutable` reads it.
        connection.close()
        connection = sqlite3.connect(f"{uri}&immutable=1", uri=True, isolation_level=None)
        connection.execute("BEGIN")
    except sqlite3.DatabaseError:
        pass  # no database at all: `check_schema` says so
    try:
        yield connection
    finally:
        connection.close()
