"""Blobs, real and fake: bytes come back under the hash of their content, or not at all."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.core.blobs import FolderBlobs, MemoryBlobs, blob_hash, get_record, put_record
from tidemill.core.errors import BlobError
from tidemill.core.records import Layer, Tree
from tidemill.core.seams import Blobs

MAKERS: dict[str, Callable[[Path], Blobs]] = {
    "folder": lambda path: FolderBlobs(path / "blobs"),
    "memory": lambda path: MemoryBlobs(),
}


@pytest.fixture(params=MAKERS)
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return MAKERS[request.param](tmp_path)


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
def test_what_is_put_comes_back(blobs: Blobs, data: bytes) -> None:
    name = blobs.put(data)
    assert name == blob_hash(data)
    assert blobs.has(name)
    assert blobs.get(name) == data
    assert blobs.put(data) == name


def test_missing_and_malformed_names(blobs: Blobs) -> None:
    missing = blob_hash(b"never stored")
    assert not blobs.has(missing)
    with pytest.raises(BlobError, match=missing):
        blobs.get(missing)
    with pytest.raises(BlobError, match="64 hexadecimal"):
        blobs.get("../../etc/passwd")


def test_records_go_through(blobs: Blobs) -> None:
    name = put_record(blobs, Layer(python="3.11.7", packages=("pytest==9",)))
    assert get_record(blobs, name, Layer).packages == ("pytest==9",)
    with pytest.raises(BlobError, match="not a Tree"):
        get_record(blobs, name, Tree)


def test_damage_is_noticed(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    name = blobs.put(b"whole")
    blobs.path(name).write_bytes(b"whol")
    with pytest.raises(BlobError, match="damaged"):
        blobs.get(name)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EROFS], ids=errno.errorcode.get)
def test_what_is_there_already_may_be_anothers_or_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    blobs = FolderBlobs(tmp_path)
    name = blobs.put(b"there")

    def refused(path: Path) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr("os.utime", refused)
    assert blobs.put(b"there") == name
    assert blobs.get(blobs.put(b"new")) == b"new"


def test_a_failed_put_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = FolderBlobs(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        blobs.put(b"too much")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
