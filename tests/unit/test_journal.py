"""The journal's file: where it may lie, whose it is, what a reader sees, how it is backed up."""

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from support.coordinator_world import World, identity, world
from tidemill.batches.backup import backup_pointer, restore_journal
from tidemill.batches.disk import file_system_of, refuse_network_disk
from tidemill.batches.journal import JournalWriter
from tidemill.core.blobs import MemoryBlobs
from tidemill.core.errors import BlobError, RunFolderError
from tidemill.core.journal import read_journal

MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb /home/fast xfs rw 0 0
//nas/share /mnt/my\\040share cifs rw 0 0
thing /mnt/odd brandnewfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/run/journal.sqlite", "ext4"),
        ("/home/me/run/journal.sqlite", "nfs4"),
        ("/home/fast/run/journal.sqlite", "xfs"),
        ("/homework/journal.sqlite", "ext4"),
        ("/mnt/my share/journal.sqlite", "cifs"),
        ("/mnt/odd/journal.sqlite", "brandnewfs"),
    ],
)
def test_the_file_system_is_that_of_the_deepest_mount(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


def test_a_network_disk_is_refused_and_an_unknown_one_is_not(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    with pytest.raises(RunFolderError, match=r"network disk \(nfs4\).*--out"):
        refuse_network_disk(Path("/home/me/journal.sqlite"), mounts)
    refuse_network_disk(Path("/mnt/odd/journal.sqlite"), mounts)
    refuse_network_disk(Path("/home/me/journal.sqlite"), tmp_path / "no proc here")


def test_a_journal_is_durable_and_keeps_its_identity(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    writer = JournalWriter(path, identity())
    assert writer._one("PRAGMA journal_mode")[0] == "wal"
    assert writer._one("PRAGMA synchronous")[0] == 2, "FULL"
    writer.close()
    JournalWriter(path, identity()).close()
    for other, message in [
        (identity(recipe="another"), "recipe"),
        (identity(max_age=3), "config"),
        (identity(rl=49), "rl tasks"),
        (identity(sft=1), "sft tasks"),
    ]:
        with pytest.raises(RunFolderError, match=message):
            JournalWriter(path, other)


def test_a_file_that_is_no_journal_is_told(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with pytest.raises(RunFolderError, match="no journal at"):
        read_journal(path)
    path.write_bytes(b"not a database at all, but long enough to look like one" * 100)
    with pytest.raises(RunFolderError, match="backup"):
        JournalWriter(path, identity())
    with pytest.raises(RunFolderError, match="no journal"):
        read_journal(path)
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE meta (key TEXT, value TEXT)")
        db.execute("INSERT INTO meta VALUES ('schema', '99')")
        db.commit()
    with pytest.raises(RunFolderError, match="schema 99"):
        read_journal(path)


def test_a_creation_cut_off_by_a_kill_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    sqlite3.connect(path).close()
    path.touch()
    JournalWriter(path, identity()).close()
    assert read_journal(path).run_id == "run"


def play(small: World) -> None:
    """One group trained, one rejected, one open."""
    small.store.publish(None)
    attempts = asyncio.run(small.coordinator.lease("w", "1", 5, 0.0))
    for attempt in attempts[:2]:
        asyncio.run(small.coordinator.complete(small.result(attempt, reward=0.25)))
    failing = attempts[2]
    asyncio.run(small.coordinator.complete(small.fault(failing, "no space left")))
    (failing,) = asyncio.run(small.coordinator.lease("w", "1", 1, 0.0))
    asyncio.run(small.coordinator.complete(small.fault(failing, "no space left again")))
    batch = asyncio.run(small.coordinator.batch(0, 0.0))
    assert batch is not None
    small.store.publish(batch)


def test_a_reader_sees_every_row_while_the_writer_lives() -> None:
    with world(identity(groups_per_batch=1)) as small:
        play(small)
        rows = read_journal(small.journal)
        assert rows.run_id == "run" and rows.recipe == "recipe" and rows.halted == ""
        assert rows.config["groups_per_batch"] == 1
        assert rows.tasks["rl"][:2] == ["task-0", "task-1"] and rows.tasks["sft"] == []
        assert [(g.state, g.batch, g.epoch) for g in rows.groups] == [("batched", 0, 0), ("rejected", None, 0)]
        trained, rejected = rows.groups
        assert (
            rejected.reason
            == "tries: attempt rl-000001-0 failed (2 env_faults, 0 lost leases); last: no space left again"
        )
        assert [(t.attempt_id, t.try_index, t.how, t.reason) for t in rows.tries] == [
            ("rl-000001-0", 0, "env_fault", "no space left"),
            ("rl-000001-0", 1, "env_fault", "no space left again"),
        ]
        done = [a for a in rows.attempts if a.group_id == trained.id]
        assert [(a.index, a.state, a.outcome, a.reward, a.tries) for a in done] == [
            (0, "done", "submitted", 0.25, 1),
            (1, "done", "submitted", 0.25, 1),
        ]
        assert {a.state for a in rows.attempts if a.group_id == rejected.id} == {"rejected", "cancelled"}
        assert len(rows.batches) == 1 and rows.batches[0].digest == small.store.manifest(1).batch


def test_a_reader_sees_a_journal_at_rest_even_where_it_cannot_write(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "journal.sqlite", identity())
    writer.close()
    tmp_path.chmod(0o500)
    try:
        assert read_journal(tmp_path / "journal.sqlite").run_id == "run"
    finally:
        tmp_path.chmod(0o700)


def test_a_reader_never_writes() -> None:
    with world() as small:
        before = small.journal.read_bytes()
        read_journal(small.journal)
        assert small.journal.read_bytes() == before


def test_a_backup_restores_the_run() -> None:
    with world(identity(groups_per_batch=1)) as small:
        play(small)
        blobs = MemoryBlobs()
        name = asyncio.run(small.coordinator.backup(blobs))
        assert backup_pointer(small.journal).read_text().strip() == name
        (after,) = asyncio.run(small.coordinator.lease("w", "1", 1, 0.0))
        with pytest.raises(RunFolderError, match="exists"):
            restore_journal(name, blobs, small.journal)
        elsewhere = small.journal.parent / "restored" / "journal.sqlite"
        elsewhere.parent.mkdir()
        with pytest.raises(BlobError, match="no backup"):
            restore_journal(blobs.put(b"something else"), blobs, elsewhere)
        restore_journal(name, blobs, elsewhere)
        small.coordinator.close()
        small.journal = elsewhere
        small.coordinator = small.open()
        status = asyncio.run(small.coordinator.status())
        assert status.trained == 2 and status.halted == ""
        (again,) = asyncio.run(small.coordinator.lease("w", "2", 1, 0.0))
        assert again.id == after.id, "what came after the backup is done again"
        assert not [p for p in small.journal.parent.parent.iterdir() if p.name.startswith(".backup")]
