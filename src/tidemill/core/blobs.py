"""Content-addressed payloads: the name of a blob is the sha256 of its bytes.

Whole blobs only: a reader never sees half of one. Episodes, snapshots of repositories and published weights lie
here; the journal's rows hold their hashes.
"""

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, final

import zstandard

from tidemill.core.errors import BlobError
from tidemill.core.files import write_whole
from tidemill.core.records import Record, decode, encode
from tidemill.core.seams import Blobs

R = TypeVar("R", bound=Record)


def blob_hash(data: bytes) -> str:
    """The name of a blob: sha256 in hex."""
    return hashlib.sha256(data).hexdigest()


def put_record(blobs: Blobs, record: Record) -> str:
    """Store a record, compressed; returns the blob's hash."""
    return blobs.put(zstandard.compress(encode(record), 3))


def get_record(blobs: Blobs, name: str, kind: type[R]) -> R:
    """Inverse of `put_record`. Raises `BlobError` for a missing or damaged blob, or one of another kind."""
    data = blobs.get(name)
    try:
        return decode(zstandard.decompress(data), kind)
    except (zstandard.ZstdError, ValueError) as error:
        raise BlobError(f"blob {name} is not a {kind.__name__}: {error}") from error


def _check_name(name: str) -> None:
    if len(name) != 64 or not all(c in "0123456789abcdef" for c in name):
        raise BlobError(f"{name!r} is no blob hash: expected 64 hexadecimal digits")


@final
class MemoryBlobs:
    """Blobs in a dictionary, for tests and for users who try a task without a run folder."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        name = blob_hash(data)
        self._data[name] = bytes(data)
        return name

    def get(self, name: str) -> bytes:
        _check_name(name)
        if name not in self._data:
            raise BlobError(f"no blob {name}")
        return self._data[name]

    def has(self, name: str) -> bool:
        _check_name(name)
        return name in self._data


@contextmanager
def lock_folder(folder: Path, *, alone: bool) -> Iterator[None]:
    """Held alone by whoever looks how old a blob of `folder` is and then deletes it, by others while they renew one."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        except OSError:
            if alone:  # where a disk has no locks, nothing is deleted, and so there is nothing to wait for
                raise
        yield
    finally:
        os.close(handle)


def _renew(path: Path) -> bool:
    """Make a blob young again: a collector leaves it to whoever is about to name it. False where there is none."""
    try:
        with lock_folder(path.parent, alone=False):
            os.utime(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return path.exists()  # another's, or on a disk that is only read: its bytes are right all the same
    return True


@final
class FolderBlobs:
    """Blobs as files, `ab/cdef…`, in a folder that any number of processes may share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        _check_name(name)
        return self.folder / name[:2] / name[2:]

    def put(self, data: bytes) -> str:
        """Durable when it returns. Raises `OSError` (disk full, …) with nothing half-written under the name."""
        name = blob_hash(data)
        path = self.path(name)
        if not _renew(path):
            path.parent.mkdir(exist_ok=True)
            write_whole(path, data)
        return name

    def get(self, name: str) -> bytes:
        try:
            data = self.path(name).read_bytes()
        except FileNotFoundError:
            raise BlobError(f"no blob {name} in {self.folder}") from None
        if blob_hash(data) != name:
            raise BlobError(f"blob {name} in {self.folder} is damaged: delete it and fetch it again")
        return data

    def has(self, name: str) -> bool:
        return self.path(name).exists()
