"""The journal's tables, how one is made, and how it is told from the journal of another run."""

import hashlib
import sqlite3
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from tidemill.batches.admission import AdmissionConfig
from tidemill.core.errors import RunFolderError
from tidemill.core.journal import SCHEMA_VERSION
from tidemill.core.records import Stage

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tasks (
    stage TEXT NOT NULL, position INTEGER NOT NULL, task_id TEXT NOT NULL, PRIMARY KEY (stage, position)
) WITHOUT ROWID;
CREATE TABLE batches (
    "index" INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, blob TEXT NOT NULL, assigned_at_s REAL NOT NULL
);
CREATE TABLE groups (
    id TEXT PRIMARY KEY, stage TEXT NOT NULL, task_id TEXT NOT NULL, position INTEGER NOT NULL,
    epoch INTEGER NOT NULL, size INTEGER NOT NULL, issued_version INTEGER NOT NULL, issued_at_s REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'complete', 'batched', 'rejected')),
    batch INTEGER REFERENCES batches ("index"), reason TEXT NOT NULL,
    UNIQUE (stage, position),
    CHECK ((state = 'batched') = (batch IS NOT NULL)),
    CHECK ((state = 'rejected') = (reason <> ''))
);
CREATE TABLE attempts (
    id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups (id), "index" INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'free' CHECK (state IN ('free', 'leased', 'done', 'rejected', 'cancelled')),
    lease_id TEXT, worker TEXT, instance TEXT, request TEXT, leased_at_s REAL, lease_until_s REAL,
    tries INTEGER NOT NULL DEFAULT 0,
    episode TEXT, outcome TEXT, reward REAL, oldest_version INTEGER, newest_version INTEGER,
    sampled_tokens INTEGER, total_tokens INTEGER, done_at_s REAL, reason TEXT NOT NULL DEFAULT '',
    UNIQUE (group_id, "index"),
    CHECK ((state = 'leased') = (lease_until_s IS NOT NULL)),
    CHECK (state <> 'done' OR (episode IS NOT NULL AND outcome <> 'env_fault'))
);
CREATE TABLE tries (
    attempt_id TEXT NOT NULL REFERENCES attempts (id), try_index INTEGER NOT NULL, lease_id TEXT NOT NULL UNIQUE,
    worker TEXT NOT NULL, how TEXT NOT NULL, at_s REAL NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (attempt_id, try_index)
) WITHOUT ROWID;
CREATE TABLE instances (
    worker TEXT NOT NULL, instance TEXT NOT NULL, seen_at_s REAL NOT NULL, retired INTEGER NOT NULL,
    PRIMARY KEY (worker, instance)
) WITHOUT ROWID;
CREATE INDEX unfinished_attempts ON attempts (state) WHERE state IN ('free', 'leased');
CREATE INDEX unplaced_groups ON groups (state) WHERE state IN ('open', 'complete');
"""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What makes a journal the one of this run; a journal of another is refused."""

    run_id: str
    recipe: str
    """Digest of the recipe."""
    seed: int
    sft_tasks: tuple[str, ...]
    """Task ids of the demonstrations, in order."""
    rl_tasks: tuple[str, ...]
    """Task ids of RL, in order; begun again from the front when all were issued (the next epoch)."""
    config: AdmissionConfig

    def __post_init__(self) -> None:
        if self.config.num_updates and not self.rl_tasks:
            raise ValueError(f"{self.config.num_updates} updates but no RL task: give rl_tasks, or num_updates=0")

    def meta(self) -> dict[str, str]:
        return {
            "schema": str(SCHEMA_VERSION),
            "run_id": self.run_id,
            "recipe": self.recipe,
            "seed": str(self.seed),
            "config": msgspec.json.encode(asdict(self.config)).decode(),
        }


def create(db: sqlite3.Connection, identity: Identity) -> None:
    """Lay out an empty journal, with all attempts of the SFT stage. Runs inside the caller's transaction."""
    for statement in SCHEMA.split(";\n"):
        if statement.strip():
            db.execute(statement)
    db.executemany("INSERT INTO meta VALUES (?, ?)", identity.meta().items())
    for stage, tasks in (("sft", identity.sft_tasks), ("rl", identity.rl_tasks)):
        db.executemany("INSERT INTO tasks VALUES (?, ?, ?)", [(stage, i, task) for i, task in enumerate(tasks)])
    if identity.config.num_demonstrations_per_task:
        for position, task_id in enumerate(identity.sft_tasks):
            insert_group(db, identity, "sft", position, task_id, epoch=0, version=-1, now_s=0.0)


def insert_group(
    db: sqlite3.Connection,
    identity: Identity,
    stage: Stage,
    position: int,
    task_id: str,
    *,
    epoch: int,
    version: int,
    now_s: float,
) -> None:
    """Issue a group with its attempts."""
    group_id = f"{stage}-{position:06d}"
    size = identity.config.group_size if stage == "rl" else identity.config.num_demonstrations_per_task
    db.execute(
        "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'open', NULL, '')",
        (group_id, stage, task_id, position, epoch, size, version, now_s),
    )
    ids = [f"{group_id}-{index}" for index in range(size)]
    db.executemany(
        'INSERT INTO attempts (id, group_id, "index", seed) VALUES (?, ?, ?, ?)',
        [(name, group_id, index, attempt_seed(identity.seed, name)) for index, name in enumerate(ids)],
    )


def check_identity(db: sqlite3.Connection, identity: Identity, path: Path) -> None:
    """Raises `RunFolderError` where the journal belongs to another run, recipe, task list or configuration."""
    found = dict(db.execute("SELECT key, value FROM meta").fetchall())
    for key, value in identity.meta().items():
        if found.get(key) != value:
            raise RunFolderError(
                f"{path} is the journal of {key} {found.get(key)}, not {value}: go on with the recipe that made it, "
                f"or choose another run folder"
            )
    for stage, tasks in (("sft", identity.sft_tasks), ("rl", identity.rl_tasks)):
        rows = db.execute("SELECT task_id FROM tasks WHERE stage = ? ORDER BY position", (stage,)).fetchall()
        if tuple(row[0] for row in rows) != tasks:
            raise RunFolderError(
                f"{path} was made for {len(rows)} other {stage} tasks: put the task set back as it was, "
                f"or choose another run folder"
            )


def attempt_seed(run_seed: int, attempt_id: str) -> int:
    """31 bits, the same for each try of an attempt."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{attempt_id}".encode()).digest()[:4], "big") >> 1
