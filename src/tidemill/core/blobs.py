"""Content-addressed payloads: the name of a blob is the sha256 of its bytes.

Whole blobs only: a reader never sees half of one. Episodes, snapshots of repositories and published weights lie
here; the journal's rows hold their hashes.
"""

import hashlib
import os
from contextlib import suppress
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
        with suppress(FileNotFoundError):
            os.utime(path)  # young again: a collector that is under way leaves it to whoever is about to name it
            return name
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
