"""The weight store in an object store, by fsspec: `s3://bucket/prefix` (the extra `s3`), or what creates exclusively.

The layout is the folder's. A version is committed by a PUT with `If-None-Match: *`, which the object store refuses
where the manifest exists: of two racers one wins. What was asked for and came back wrong (an error of the service, a
read that was cut short) is asked for again, a few times; the name of a blob tells whether it is right.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, final

from tidemill.core.blobs import blob_hash
from tidemill.core.errors import BlobError, UsageError
from tidemill.deltas.layout import manifest_name, versions_among
from tidemill.deltas.store import KEYFRAME_EVERY, FolderStore, SnapshotStore

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
NUM_TRIES = 5
FIRST_PAUSE_S = 0.1
ASK_BYTES = 8 << 20
NUM_RECENT = 16
NUM_MANIFESTS = 64
EXCLUSIVE = ("s3", "s3a", "gs", "gcs", "memory")
"""Protocols whose fsspec file systems create exclusively."""


@final
class ObjectBlobs:
    """Content-addressed payloads under a prefix of an object store."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root
        self._known: OrderedDict[str, None] = OrderedDict()
        self._recent: OrderedDict[str, bytes] = OrderedDict()

    def path(self, name: str) -> str:
        if len(name) != 64 or not all(c in "0123456789abcdef" for c in name):
            raise BlobError(f"{name!r} is no blob hash: expected 64 hexadecimal digits")
        return f"{self._root}/{name[:2]}/{name[2:]}"

    def put(self, data: bytes) -> str:
        """Raises `BlobError` where the object store does not take it."""
        name = blob_hash(data)
        # Over a long line, asking whether a small blob is there takes as long as sending it.
        if name not in self._known and (len(data) < ASK_BYTES or not self.has(name)):
            again(lambda: self._fs.pipe_file(self.path(name), data), f"storing blob {name}")
        _remember(self._known, name, None, NUM_MANIFESTS)
        return name

    def get(self, name: str) -> bytes:
        path = self.path(name)

        def fetch() -> bytes:
            try:
                data: bytes = self._fs.cat_file(path)
            except FileNotFoundError:
                raise BlobError(f"no blob {name} in {self._root}") from None
            if blob_hash(data) != name:
                raise OSError(f"blob {name} in {self._root} is damaged, or was cut off on the way")
            return data

        if (recent := self._recent.get(name)) is not None:
            return recent
        data = again(fetch, f"fetching blob {name}")
        if len(data) < ASK_BYTES:  # configuration and tokenizer are the same for every version
            _remember(self._recent, name, data, NUM_RECENT)
        return data

    def has(self, name: str) -> bool:
        path = self.path(name)
        return again(lambda: bool(self._fs.exists(path)), f"looking for blob {name}")


@final
class ObjectStore(SnapshotStore):
    """Versions in an object store, which any number of processes anywhere may share."""

    def __init__(
        self, url: str, *, options: dict[str, Any] | None = None, keyframe_every: int = KEYFRAME_EVERY, threads: int = 1
    ) -> None:
        """`options`: of the fsspec file system, such as `endpoint_url`. Raises `UsageError`."""
        protocol = url.partition("://")[0]
        if protocol not in EXCLUSIVE:
            raise UsageError(f"{url}: a store needs exclusive creation, which of fsspec's {', '.join(EXCLUSIVE)} have")
        try:
            import fsspec

            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **(options or {}))
        except ImportError as error:
            raise UsageError(f"{url} needs another package ({error}): pip install 'tidemill[s3]'") from None
        self._root = str(root).rstrip("/")
        self.url = url
        self._manifests: OrderedDict[int, bytes] = OrderedDict()
        """Those last seen here: a manifest never changes."""
        self._num_manifests = max(NUM_MANIFESTS, 2 * keyframe_every)
        self._newest: int | None = None
        super().__init__(ObjectBlobs(self._fs, f"{self._root}/blobs"), keyframe_every=keyframe_every, threads=threads)

    def __str__(self) -> str:
        return self.url

    def published_s(self, version: int) -> float:
        """When a version appeared, in seconds since the epoch; 0 where the object store does not say."""
        info = again(lambda: self._fs.info(self._path(version)), f"looking at version {version}")
        at = info.get("LastModified") or info.get("created")
        return at.timestamp() if isinstance(at, datetime) else 0.0

    def _path(self, version: int) -> str:
        return f"{self._root}/versions/{manifest_name(version)}"

    def _create(self, version: int, manifest: bytes) -> bool:
        def create() -> bool:
            try:
                self._fs.pipe_file(self._path(version), manifest, mode="create")
            except FileExistsError:
                return False
            return True

        # An answer that was lost may have committed: the second try then finds the manifest, and `publish` compares.
        created = again(create, f"committing version {version}")
        if created:
            _remember(self._manifests, version, manifest, self._num_manifests)
        return created

    def _read(self, version: int) -> bytes | None:
        def read() -> bytes | None:
            try:
                data: bytes = self._fs.cat_file(self._path(version))
            except FileNotFoundError:
                return None
            if not data.endswith(b"}\n"):
                raise OSError("it was cut off on the way, or is damaged")
            return data

        manifest = self._manifests.get(version)
        if manifest is None:
            manifest = again(read, f"reading the manifest of version {version}")
            if manifest is not None:
                _remember(self._manifests, version, manifest, self._num_manifests)
        return manifest

    def head(self) -> int | None:
        """Versions have no gaps and never go: who knows one asks for the next, and lists them all only at first."""
        if self._newest is None:
            self._newest = super().head()
        else:
            while self._read(self._newest + 1) is not None:
                self._newest += 1
        return self._newest

    def _versions(self) -> list[int]:
        def names() -> list[str]:
            try:
                return [str(path) for path in self._fs.ls(f"{self._root}/versions", detail=False)]
            except FileNotFoundError:
                return []

        return versions_among(name.rpartition("/")[2] for name in again(names, "listing the versions"))


def _remember(recent: OrderedDict[K, V], key: K, value: V, num: int) -> None:
    """The last `num` that were new; nothing here grows with the history of a store."""
    recent[key] = value
    while len(recent) > num:
        recent.popitem(last=False)  # whole, whatever another thread remembers meanwhile


def again(call: Callable[[], T], what: str) -> T:
    """The result of `call`, tried a few times. Raises `BlobError` with the last cause; other `TidemillError`s pass."""
    pause_s = FIRST_PAUSE_S
    for left in range(NUM_TRIES - 1, -1, -1):
        try:
            return call()
        except FileNotFoundError:
            raise
        except OSError as error:
            if not left:
                raise BlobError(f"{what} failed {NUM_TRIES} times: {error}") from error
        time.sleep(pause_s)
        pause_s *= 2
    raise AssertionError


def open_store(location: str | Path, *, options: dict[str, Any] | None = None) -> FolderStore | ObjectStore:
    """A store by its folder or its URL."""
    text = str(location)
    return ObjectStore(text, options=options) if "://" in text else FolderStore(text)
