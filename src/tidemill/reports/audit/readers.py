"""Readers of a run folder, written a second time: they trust no code of the services.

journal.sqlite   read-only: groups, attempts, batches
blobs/ store/    files named by the sha256 of their bytes; records are MessagePack under zstd
events/ proc.jsonl metrics.jsonl eval.jsonl   a JSON line each; a last line cut off by a kill is skipped
"""

import fcntl
import hashlib
import json
import os
import sqlite3
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import zstandard

EVENT_KEYS = frozenset({"who", "what", "from_s", "to_s", "ids", "numbers"})
SAMPLE_KEYS = frozenset({"who", "at_s", "pid", "ticks", "ticks_per_s"})


class NoRun(ValueError):
    """The folder cannot be audited at all; `str()` is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    id: str
    stage: str
    task_id: str
    size: int
    issued_version: int
    state: str
    """`open`, `complete`, `batched` or `rejected`."""
    batch: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    id: str
    group_id: str
    state: str
    """`free`, `leased`, `done`, `rejected` or `cancelled`."""
    episode: str | None
    outcome: str | None
    reward: float | None
    oldest_version: int | None
    newest_version: int | None
    sampled_tokens: int | None
    total_tokens: int | None
    done_at_s: float | None
    tries: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    index: int
    digest: str
    blob: str
    assigned_at_s: float


@dataclass(frozen=True, kw_only=True)
class Journal:
    meta: dict[str, str]
    config: dict[str, Any]
    """Of admission: `group_size`, `groups_per_batch`, `max_age`, `num_updates`, …"""
    groups: dict[str, GroupRow]
    attempts: dict[str, AttemptRow]
    batches: dict[int, BatchRow]
    num_lost: dict[str, int]
    """How a lease ended without a result → how many did."""


@dataclass(frozen=True)
class BlobFolder:
    """Blobs as files `ab/cdef…`, each named by the sha256 of its bytes."""

    folder: Path

    def get(self, name: str) -> bytes:
        """Raises `ValueError` where the blob is missing or damaged."""
        try:
            data = (self.folder / name[:2] / name[2:]).read_bytes()
        except OSError:
            raise ValueError(f"blob {name[:12]} is missing") from None
        if hashlib.sha256(data).hexdigest() != name:
            raise ValueError(f"blob {name[:12]} is damaged: its bytes have another sha256")
        return data

    def record(self, name: str) -> tuple[dict[str, Any], str]:
        """A record, and the sha256 of its encoding. Raises `ValueError`."""
        data = self.get(name)
        try:
            plain = zstandard.decompress(data)
            record = msgspec.msgpack.decode(plain)
        except (zstandard.ZstdError, msgspec.DecodeError) as error:
            raise ValueError(f"blob {name[:12]} holds no record: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"blob {name[:12]} holds no record")
        return record, hashlib.sha256(plain).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that a run folder says, unjudged."""

    folder: Path
    running: bool
    journal: Journal
    blobs: BlobFolder
    store_blobs: BlobFolder
    manifests: dict[int, dict[str, Any]]
    published_s: dict[int, float]
    """When a version appeared: its manifest's time, or the learner's event where that is earlier (a copied folder)."""
    manifest_problems: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    proc: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    line_problems: list[str] = field(default_factory=list)
    """Lines of the `.jsonl` files that are damaged, other than a cut-off last one."""

    @property
    def groups(self) -> dict[str, GroupRow]:
        return self.journal.groups

    @property
    def attempts(self) -> dict[str, AttemptRow]:
        return self.journal.attempts

    @property
    def batches(self) -> dict[int, BatchRow]:
        return self.journal.batches

    @property
    def head(self) -> int:
        """Newest version; −1 where there is none."""
        return max(self.manifests, default=-1)


def read_run(folder: Path) -> Run:
    """Read all but the episodes. Raises `NoRun` with one clear line."""
    if not folder.is_dir():
        raise NoRun(f"{folder} is no folder: give the --out folder of a run")
    journal = folder / "journal.sqlite"
    if not journal.exists():
        raise NoRun(f"{folder} is no run: it holds no journal.sqlite; give the --out folder of a run")
    manifests, published_s, manifest_problems = _read_manifests(folder / "store" / "versions")
    problems: list[str] = []
    events = [
        event
        for path in sorted((folder / "events").glob("*.jsonl"))
        for event in _json_lines(path, problems, EVENT_KEYS)
    ]
    for event in events:
        if event["what"] == "publish" and event.get("version") in published_s:
            published_s[event["version"]] = min(published_s[event["version"]], event["to_s"])
    return Run(
        folder=folder,
        running=is_locked(folder / "lock"),
        journal=_read_journal(journal),
        blobs=BlobFolder(folder / "blobs"),
        store_blobs=BlobFolder(folder / "store" / "blobs"),
        manifests=manifests,
        published_s=published_s,
        manifest_problems=manifest_problems,
        events=sorted(events, key=lambda event: event["from_s"]),
        metrics=_json_lines(folder / "metrics.jsonl", problems),
        proc=_json_lines(folder / "proc.jsonl", problems, SAMPLE_KEYS),
        evaluations=_json_lines(folder / "eval.jsonl", problems),
        line_problems=problems,
    )


def is_locked(path: Path) -> bool:
    """Whether a living run holds the folder: its lock cannot be shared."""
    if not path.exists():
        return False
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _read_journal(path: Path) -> Journal:
    """All rows from one read transaction. Raises `NoRun` for a damaged file, or one that is no journal."""
    # Without a write-ahead log nobody writes, and `immutable` also reads a copy in a folder that cannot be written.
    idle = not path.with_name(path.name + "-wal").exists()
    uri = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if idle else ''}"
    try:
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=10.0)
        connection.row_factory = sqlite3.Row
        try:
            connection.execute("BEGIN")
            fault = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if fault != "ok":
                raise NoRun(f"{path} is damaged ({' '.join(fault.split())}): restore it from its backup")
            meta = {row["key"]: row["value"] for row in connection.execute("SELECT key, value FROM meta")}
            return Journal(
                meta=meta,
                config=json.loads(meta["config"]),
                groups={row["id"]: GroupRow(**_pick(GroupRow, row)) for row in _all(connection, "groups")},
                attempts={row["id"]: AttemptRow(**_pick(AttemptRow, row)) for row in _all(connection, "attempts")},
                batches={row["index"]: BatchRow(**_pick(BatchRow, row)) for row in _all(connection, "batches")},
                num_lost=dict(Counter(row["how"] for row in _all(connection, "tries"))),
            )
        finally:
            connection.close()
    except (sqlite3.DatabaseError, KeyError, ValueError) as error:
        if isinstance(error, NoRun):
            raise
        raise NoRun(f"{path} cannot be read as a journal ({error}): it is damaged, or of another version") from None


def _all(connection: sqlite3.Connection, table: str) -> list[sqlite3.Row]:
    return connection.execute(f"SELECT * FROM {table}").fetchall()


def _pick(kind: type[Any], row: sqlite3.Row) -> dict[str, Any]:
    return {entry.name: row[entry.name] for entry in fields(kind)}


def _read_manifests(folder: Path) -> tuple[dict[int, dict[str, Any]], dict[int, float], list[str]]:
    manifests: dict[int, dict[str, Any]] = {}
    published_s: dict[int, float] = {}
    problems: list[str] = []
    needed = {"version", "kind", "parent", "files", "tensors", "num_bytes", "batch", "step", "model", "run_id"}
    for path in sorted(folder.glob("[0-9]*.json")):
        try:
            manifest = json.loads(path.read_bytes())
        except ValueError as error:
            problems.append(f"manifest {path.name} is damaged: {error}")
            continue
        if not isinstance(manifest, dict) or needed - manifest.keys():
            problems.append(f"manifest {path.name} is damaged: it describes no version")
            continue
        manifests[int(path.stem)] = manifest
        published_s[int(path.stem)] = path.stat().st_mtime
    return manifests, published_s, problems


def _json_lines(path: Path, problems: list[str], needed: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    rows = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except ValueError:
            if number < len(lines):
                problems.append(f"{path.name}, line {number}, is damaged")
            continue
        if isinstance(row, dict) and needed <= row.keys():
            rows.append(row)
        else:
            problems.append(f"{path.name}, line {number}, is damaged")
    return rows
