"""Copies of the journal in the blobs, so that a run outlives the disk of its coordinator."""

import os
import sqlite3
import tempfile
from pathlib import Path

import zstandard

from tidemill.core.errors import BlobError, RunFolderError
from tidemill.core.seams import Blobs

PAGES_PER_STEP = 512
"""The writer gets its turn between steps."""


def backup_journal(journal: Path, to: Blobs) -> str:
    """Copy the journal, as it is at one instant, into blobs; returns the blob's hash.

    The newest hash is also kept beside the journal, in `<name>.backup`.
    """
    with tempfile.TemporaryDirectory(prefix=".backup-", dir=journal.parent) as folder:
        copy = Path(folder) / "copy.sqlite"
        source = sqlite3.connect(f"{journal.resolve().as_uri()}?mode=ro", uri=True)
        target = sqlite3.connect(copy)
        try:
            source.execute("PRAGMA busy_timeout = 10000")
            source.backup(target, pages=PAGES_PER_STEP, sleep=0.005)
            target.execute("PRAGMA journal_mode = DELETE")  # one file, complete without a log beside it
        finally:
            target.close()
            source.close()
        name = to.put(zstandard.compress(copy.read_bytes(), 3))
        pointer = Path(folder) / "pointer"
        pointer.write_text(name + "\n")
        os.replace(pointer, backup_pointer(journal))
    return name


def backup_pointer(journal: Path) -> Path:
    """The file that names the newest backup."""
    return journal.with_name(journal.name + ".backup")


def restore_journal(name: str, blobs: Blobs, journal: Path) -> None:
    """Put a backup back. Raises `RunFolderError` where a journal is there already, `BlobError` for a bad backup."""
    if journal.exists():
        raise RunFolderError(f"{journal} exists: move it away before restoring a backup")
    try:
        data = zstandard.decompress(blobs.get(name))
    except zstandard.ZstdError as error:
        raise BlobError(f"blob {name} is no backup of a journal: {error}") from error
    handle, temporary = tempfile.mkstemp(dir=journal.parent, prefix=".restore-")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, journal)
