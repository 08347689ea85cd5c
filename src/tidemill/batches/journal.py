"""The journal's writer: what happened in a run, one transaction per transition (SQLite, WAL, local disk only).

Rows hold states and hashes, payloads lie in the blobs. Every count is a query: nothing is kept beside the rows, so
that nothing can come back from a crash without the rest. `core.journal` describes the rows and reads them.

    group    open ──all attempts done──► complete ──assign──► batched        (trained: derived from the store)
               └──────────reject───────────┴────► rejected, with a reason
    attempt  free ──lease──► leased ──result──► done
               ▲                │ env_fault, or lease lost
               └──tries left────┴──none left──► rejected (and its group)      others of that group: cancelled
"""

import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tidemill.batches.admission import Candidate, num_issuable
from tidemill.batches.disk import refuse_network_disk
from tidemill.batches.schema import Identity, check_identity, create, insert_group
from tidemill.core.errors import CoordinatorError, RunFolderError
from tidemill.core.journal import BatchRow, LostHow, check_schema
from tidemill.core.records import Attempt, AttemptResult, Stage

RESULT_FIELDS = tuple(name for name in AttemptResult.__struct_fields__ if name not in ("attempt_id", "lease_id"))
"""Columns of `attempts` under the same names."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """In attempts of one stage."""

    issued: int
    """Leased at least once."""
    leased: int
    accepted: int
    """With a final result: trained + queued + rejected."""
    trained: int
    queued: int
    rejected: int


@final
class JournalWriter:
    """Owns the database connection. Methods are one transaction each and never wait for anything but the disk."""

    def __init__(self, path: Path, identity: Identity) -> None:
        """Open, or create. Raises `RunFolderError` for a network disk, another run's journal or a damaged one."""
        refuse_network_disk(path)
        self.path = path
        self.identity = identity
        self.config = identity.config
        self._db = sqlite3.connect(path, isolation_level=None, timeout=10.0)
        self._db.row_factory = sqlite3.Row
        try:
            mode = self._db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode != "wal":
                raise RunFolderError(f"{path}: this disk allows no write-ahead log ({mode}): choose a local disk")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA foreign_keys = ON")
            # Asked of the database, not of the file: a creation that was killed half-way leaves an empty one.
            if not self._all("SELECT 1 FROM sqlite_master"):
                with self._transaction():
                    create(self._db, identity)
            check_schema(self._db, path)
            check_identity(self._db, identity, path)
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise RunFolderError(f"{path} cannot be used as a journal ({error}): restore it from its backup") from error
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    # --- leases ----------------------------------------------------------------------------------------------

    def lease(
        self, worker: str, instance: str, num: int, *, stage: Stage, version: int, request: str, now_s: float
    ) -> list[Attempt]:
        """Up to `num` attempts of `stage` for this instance; new RL groups are issued as the capacity at `version`
        allows, and attempts of older groups go first. Repeating a `request` returns what it was given.

        Raises `CoordinatorError` where the instance was superseded by a newer one of the same worker.
        """
        with self._transaction():
            self._enter(worker, instance, now_s)
            held = self._attempts("a.state = 'leased' AND a.instance = ? AND a.request = ?", (instance, request))
            if held:
                return held
            for row in self._all("SELECT * FROM attempts WHERE state = 'leased' AND lease_until_s < ?", now_s):
                self._lose(row, "expired", now_s, "its lease was not renewed")
            free = self._free(stage, num)
            while len(free) < num and stage == "rl" and self._issue(version, now_s):
                free = self._free(stage, num)
            for attempt_id in free:
                self._db.execute(
                    "UPDATE attempts SET state = 'leased', lease_id = ?, worker = ?, instance = ?, request = ?, "
                    "leased_at_s = ?, lease_until_s = ?, tries = tries + 1 WHERE id = ?",
                    (uuid.uuid4().hex, worker, instance, request, now_s, now_s + self.config.lease_s, attempt_id),
                )
            return self._attempts(f"a.id IN ({', '.join('?' * len(free))})", free)

    def renew(self, worker: str, instance: str, lease_ids: Sequence[str], *, now_s: float) -> list[str]:
        """Those of `lease_ids` that still stand, prolonged. One that ran out but was not taken back stands again."""
        with self._transaction():
            standing = []
            for lease_id in dict.fromkeys(lease_ids):
                changed = self._db.execute(
                    "UPDATE attempts SET lease_until_s = ? "
                    "WHERE state = 'leased' AND lease_id = ? AND worker = ? AND instance = ?",
                    (now_s + self.config.lease_s, lease_id, worker, instance),
                )
                if changed.rowcount:
                    standing.append(lease_id)
            return standing

    def prolong_all(self, *, now_s: float) -> None:
        """Every lease from now on: nobody could renew while the coordinator was away."""
        with self._transaction():
            self._db.execute(
                "UPDATE attempts SET lease_until_s = ? WHERE state = 'leased'", (now_s + self.config.lease_s,)
            )

    def complete(self, result: AttemptResult, *, now_s: float) -> bool:
        """Take a result. False where its lease does not stand; the same result again is taken again, once."""
        with self._transaction():
            row = self._one("SELECT * FROM attempts WHERE id = ?", result.attempt_id)
            if row is None:
                raise CoordinatorError(f"there is no attempt {result.attempt_id} in this run: is this another run's?")
            if row["lease_id"] != result.lease_id:
                faulted = "SELECT 1 FROM tries WHERE lease_id = ? AND attempt_id = ? AND how = 'env_fault'"
                told_before = self._one(faulted, result.lease_id, result.attempt_id) is not None
                return told_before and result.outcome == "env_fault"
            if row["state"] != "leased":
                same = all(row[name] == getattr(result, name) for name in RESULT_FIELDS)
                return same and row["state"] in ("done", "rejected")
            if result.outcome == "env_fault":
                self._lose(row, "env_fault", now_s, result.reason or "no reason given", result)
            else:
                self._store_result(result, "done", now_s)
                self._close_group(row["group_id"])
            return True

    # --- batches ---------------------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """RL groups that are in no batch yet, in order of issue."""
        rows = self._all(
            "SELECT g.id, g.position, g.issued_version, g.state, "
            "min(CASE WHEN a.state = 'done' AND a.oldest_version >= 0 THEN a.oldest_version END) AS oldest "
            "FROM groups g JOIN attempts a ON a.group_id = g.id "
            "WHERE g.stage = 'rl' AND g.state IN ('open', 'complete') GROUP BY g.id ORDER BY g.position"
        )
        return [
            Candidate(
                id=row["id"],
                position=row["position"],
                issued_version=row["issued_version"],
                oldest_version=row["oldest"],
                complete=row["state"] == "complete",
            )
            for row in rows
        ]

    def group_results(self, group_id: str) -> list[AttemptResult]:
        """Results of a complete group, by index."""
        rows = self._all("SELECT * FROM attempts WHERE group_id = ? AND state = 'done' ORDER BY \"index\"", group_id)
        return [_result(row) for row in rows]

    def group_task(self, group_id: str) -> str:
        row = self._one("SELECT task_id FROM groups WHERE id = ?", group_id)
        assert row is not None
        return row["task_id"]

    def reject(self, groups: Mapping[str, str]) -> None:
        """Reject groups for the reasons given; their unfinished attempts are cancelled, their leases end."""
        if groups:
            with self._transaction():
                for group_id, reason in groups.items():
                    self._reject(group_id, reason)

    def assign(self, index: int, *, digest: str, blob: str, groups: Sequence[str], now_s: float) -> None:
        """Make batch `index`, for ever."""
        with self._transaction():
            assert index == len(self.batches()), f"batch {index} out of turn"
            self._db.execute("INSERT INTO batches VALUES (?, ?, ?, ?)", (index, digest, blob, now_s))
            for group_id in groups:
                changed = self._db.execute(
                    "UPDATE groups SET state = 'batched', batch = ? WHERE id = ? AND state = 'complete'",
                    (index, group_id),
                )
                assert changed.rowcount == 1, f"group {group_id} is not complete"

    def batches(self) -> list[BatchRow]:
        return [
            BatchRow(index=row["index"], digest=row["digest"], blob=row["blob"], assigned_at_s=row["assigned_at_s"])
            for row in self._all('SELECT * FROM batches ORDER BY "index"')
        ]

    def demonstrations(self) -> list[AttemptResult] | None:
        """Results of the SFT stage in order, without those attempts that used up their tries; None while some are
        missing."""
        source = "FROM attempts a JOIN groups g ON g.id = a.group_id WHERE g.stage = 'sft'"
        if self._one(f"SELECT 1 {source} AND a.state IN ('free', 'leased') LIMIT 1") is not None:
            return None
        rows = self._all(f"SELECT a.* {source} AND a.state = 'done' ORDER BY g.position, a.\"index\"")
        return [_result(row) for row in rows]

    # --- the run ---------------------------------------------------------------------------------------------

    def halted(self) -> str:
        """The cause that stopped the run, or nothing."""
        row = self._one("SELECT value FROM meta WHERE key = 'halted'")
        return "" if row is None else row["value"]

    def halt(self, cause: str) -> None:
        """The first cause stands."""
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('halted', ?)", (cause,))

    def clear_halt(self) -> None:
        """The user has started the run again."""
        with self._transaction():
            self._db.execute("DELETE FROM meta WHERE key = 'halted'")

    def counts(self, stage: Stage, num_trained: int) -> Counts:
        """`num_trained`: batches whose version exists. Each count is a query of its own, so that a hole shows."""
        done = "a.outcome IS NOT NULL"
        refused = "(a.state = 'rejected' OR g.state = 'rejected')"
        trained = f"coalesce(g.batch < {int(num_trained)}, 0)"
        row = self._one(
            f"SELECT coalesce(sum(a.tries > 0), 0) AS issued, coalesce(sum(a.state = 'leased'), 0) AS leased, "
            f"coalesce(sum({done}), 0) AS accepted, coalesce(sum({done} AND {trained}), 0) AS trained, "
            f"coalesce(sum({done} AND a.state = 'done' AND g.state <> 'rejected' AND NOT {trained}), 0) AS queued, "
            f"coalesce(sum({done} AND {refused}), 0) AS rejected "
            f"FROM attempts a JOIN groups g ON g.id = a.group_id WHERE g.stage = ?",
            stage,
        )
        assert row is not None
        return Counts(**dict(row))

    # --- inside a transaction --------------------------------------------------------------------------------

    def _enter(self, worker: str, instance: str, now_s: float) -> None:
        """Note who asks; the newest instance of a worker is the living one."""
        known = self._one("SELECT retired FROM instances WHERE worker = ? AND instance = ?", worker, instance)
        if known is not None:
            if known["retired"]:
                raise CoordinatorError(
                    f"{worker} was started again since (this is instance {instance}): end this process, "
                    f"or give each worker a name of its own"
                )
            return
        self._db.execute("UPDATE instances SET retired = 1 WHERE worker = ?", (worker,))
        self._db.execute("INSERT INTO instances VALUES (?, ?, ?, 0)", (worker, instance, now_s))
        for row in self._all("SELECT * FROM attempts WHERE state = 'leased' AND worker = ?", worker):
            self._lose(row, "superseded", now_s, f"{worker} was started again")

    def _free(self, stage: Stage, num: int) -> list[str]:
        rows = self._all(
            "SELECT a.id FROM attempts a JOIN groups g ON g.id = a.group_id WHERE a.state = 'free' AND g.stage = ? "
            'ORDER BY g.position, a."index" LIMIT ?',
            stage,
            num,
        )
        return [row["id"] for row in rows]

    def _issue(self, version: int, now_s: float) -> bool:
        """Issue the next RL group, where there is room for one."""
        row = self._one(
            "SELECT count(*) AS num, coalesce(sum(state <> 'rejected'), 0) AS standing FROM groups WHERE stage = 'rl'"
        )
        assert row is not None
        if num_issuable(version=version, num_standing=row["standing"], config=self.config) == 0:
            return False
        epoch, place = divmod(row["num"], len(self.identity.rl_tasks))
        task_id = self.identity.rl_tasks[place]
        insert_group(self._db, self.identity, "rl", row["num"], task_id, epoch=epoch, version=version, now_s=now_s)
        return True

    def _lose(
        self, row: sqlite3.Row, how: LostHow, now_s: float, reason: str, result: AttemptResult | None = None
    ) -> None:
        """A lease ended without a result: issue the attempt again, or reject it where it used up its tries."""
        self._db.execute(
            "INSERT INTO tries VALUES (?, ?, ?, ?, ?, ?, ?)",
            (row["id"], row["tries"] - 1, row["lease_id"], row["worker"], how, now_s, reason),
        )
        spent = self._one(
            "SELECT sum(how = 'env_fault') AS faults, sum(how <> 'env_fault') AS losses FROM tries "
            "WHERE attempt_id = ?",
            row["id"],
        )
        assert spent is not None
        if spent["faults"] < self.config.max_tries and spent["losses"] < self.config.max_losses:
            self._db.execute(
                "UPDATE attempts SET state = 'free', lease_id = NULL, worker = NULL, instance = NULL, request = NULL, "
                "lease_until_s = NULL WHERE id = ?",
                (row["id"],),
            )
            return
        count = f"{spent['faults']} env_faults, {spent['losses']} lost leases"
        if result is None:
            self._db.execute(
                "UPDATE attempts SET state = 'rejected', lease_id = NULL, lease_until_s = NULL, reason = ? "
                "WHERE id = ?",
                (reason, row["id"]),
            )
        else:
            self._store_result(result, "rejected", now_s)
        group = self._one("SELECT stage FROM groups WHERE id = ?", row["group_id"])
        assert group is not None
        if group["stage"] == "rl":
            self._reject(row["group_id"], f"tries: attempt {row['id']} failed ({count}); last: {reason}")
        else:
            self._close_group(row["group_id"])

    def _store_result(self, result: AttemptResult, state: str, now_s: float) -> None:
        columns = ", ".join(f"{name} = ?" for name in RESULT_FIELDS)
        values = [getattr(result, name) for name in RESULT_FIELDS]
        self._db.execute(
            f"UPDATE attempts SET state = ?, done_at_s = ?, lease_until_s = NULL, {columns} WHERE id = ?",
            (state, now_s, *values, result.attempt_id),
        )

    def _close_group(self, group_id: str) -> None:
        row = self._one(
            "SELECT sum(state IN ('free', 'leased')) AS under_way, sum(state = 'done') AS done FROM attempts "
            "WHERE group_id = ?",
            group_id,
        )
        assert row is not None
        if row["under_way"]:
            return
        if row["done"]:
            self._db.execute("UPDATE groups SET state = 'complete' WHERE id = ? AND state = 'open'", (group_id,))
        else:
            self._reject(group_id, "tries: every attempt failed")

    def _reject(self, group_id: str, reason: str) -> None:
        changed = self._db.execute(
            "UPDATE groups SET state = 'rejected', reason = ? WHERE id = ? AND state IN ('open', 'complete')",
            (reason, group_id),
        )
        assert changed.rowcount == 1, f"group {group_id} cannot be rejected"
        self._db.execute(
            "UPDATE attempts SET state = 'cancelled', lease_id = NULL, lease_until_s = NULL WHERE group_id = ? "
            "AND state IN ('free', 'leased')",
            (group_id,),
        )

    # --- plumbing --------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _all(self, sql: str, *values: object) -> list[sqlite3.Row]:
        return self._db.execute(sql, values).fetchall()

    def _one(self, sql: str, *values: object) -> sqlite3.Row | None:
        return self._db.execute(sql, values).fetchone()

    def _attempts(self, where: str, values: Sequence[object]) -> list[Attempt]:
        rows = self._all(
            f"SELECT a.*, g.task_id, g.stage, g.issued_version FROM attempts a JOIN groups g ON g.id = a.group_id "
            f'WHERE {where} ORDER BY g.position, a."index"',
            *values,
        )
        return [
            Attempt(
                id=row["id"],
                group_id=row["group_id"],
                task_id=row["task_id"],
                stage=row["stage"],
                seed=row["seed"],
                lease_id=row["lease_id"],
                lease_until_s=row["lease_until_s"],
                try_index=row["tries"] - 1,
                min_version=row["issued_version"],
            )
            for row in rows
        ]


def _result(row: sqlite3.Row) -> AttemptResult:
    return AttemptResult(attempt_id=row["id"], lease_id=row["lease_id"], **{name: row[name] for name in RESULT_FIELDS})
