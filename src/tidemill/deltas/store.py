"""The weight store: blobs and one small manifest per version; a version is a keyframe, or a delta to an earlier one.

A version is committed by the exclusive creation of its manifest, and by nothing else: the payload is written first,
under the hashes of its bytes, then `versions/00000007.json` appears whole or not at all. Where two writers race for a
version exactly one wins. Retries are harmless: the same weights under the same version give the manifest that stands.

A chain of deltas begins at a keyframe and has at most `KEYFRAME_EVERY` versions, fewer where its deltas would add up to
more than a keyframe, or where its newest version cannot be read: so damage ends at the next publication. Whoever
reads a version checks each tensor against the hash in the manifest.

    STORE/blobs/ab/cdef…            config.json, model.safetensors or model.delta, tokenizer files: shared by content
    STORE/versions/00000007.json    a `Snapshot`
    STORE/HEAD                      the newest version, as a hint for people; never read here
"""

import hashlib
import json
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, final

import msgspec

from tidemill.core.blobs import FolderBlobs, MemoryBlobs
from tidemill.core.errors import BlobError, DeltaError, StoreError, VersionTaken
from tidemill.core.records import Snapshot
from tidemill.core.seams import Blobs, Weights
from tidemill.deltas.codec import apply, apply_stream, diff
from tidemill.deltas.layout import (
    CONFIG_FILE,
    DELTA_FILE,
    WEIGHTS_FILE,
    array_of,
    codec_tensors,
    manifest_name,
    read_weights_file,
    side_files,
    tensor_hash,
    versions_among,
    weights_files,
)
from tidemill.deltas.words import Tensor

SMALL_BYTES = 64 << 20
KEYFRAME_EVERY = 30
"""Versions from one keyframe to the next, at most."""


class _Base(NamedTuple):
    tensors: dict[str, Tensor]
    links_bytes: list[int]
    """Of the manifests of the deltas since the keyframe."""


class SnapshotStore(ABC):
    """What all stores share: everything but where the manifests lie."""

    def __init__(self, blobs: Blobs, *, keyframe_every: int = KEYFRAME_EVERY, threads: int = 1) -> None:
        if keyframe_every < 1:
            raise StoreError(f"keyframe_every is {keyframe_every}: give 1 (no deltas) or more")
        self.blobs = blobs
        self._keyframe_every = keyframe_every
        self._threads = threads
        self._held: tuple[int, Weights] | None = None
        """The version that was last published or loaded here: the base of the next delta."""

    @abstractmethod
    def _create(self, version: int, manifest: bytes) -> bool:
        """Create a manifest, whole and durable, if there is none; False where there is one already."""

    @abstractmethod
    def _read(self, version: int) -> bytes | None: ...

    @abstractmethod
    def _versions(self) -> list[int]: ...

    def publish(self, weights: Weights, *, version: int, batch: str | None, step: int, run_id: str) -> Snapshot:
        """Commit a version: see `core.seams.Store`. Raises `OSError` (disk full, …) with no version created."""
        if version < 0:
            raise StoreError(f"version {version} is negative: versions start at 0")
        previous = None
        if version > 0:
            if self._read(version - 1) is None:
                raise StoreError(f"version {version} cannot be published: version {version - 1} does not exist")
            previous = self.manifest(version - 1)
        files = side_files(weights)
        tensors = codec_tensors(weights)
        snapshot = Snapshot(
            version=version,
            kind="full",
            parent=None,
            files={},
            tensors={name: tensor_hash(array) for name, array in sorted(weights.tensors.items())},
            num_bytes=0,
            batch=batch,
            step=step,
            model=hashlib.sha256(files[CONFIG_FILE]).hexdigest(),
            run_id=run_id,
        )
        if previous is not None:
            _check_succession(previous, snapshot)
        with ThreadPoolExecutor(1, thread_name_prefix="store") as aside:
            # Over a long line each question takes as long as the coding: they are asked meanwhile.
            standing = aside.submit(self._read, version)
            base = None if previous is None else self._base(previous)
            delta = None if base is None else self._delta(base, tensors, sum(map(len, files.values())))
            if standing.result() is not None:
                return self._standing(snapshot, weights)
            if delta is not None and base is not None:
                sent = aside.submit(self.blobs.put, delta)
                if not self._leads(delta, base.tensors):
                    delta = None
                sent.result()
        if delta is None:
            files[WEIGHTS_FILE] = weights_files(weights)[WEIGHTS_FILE]
        else:
            files[DELTA_FILE] = delta
        snapshot = msgspec.structs.replace(
            snapshot,
            kind="full" if delta is None else "delta",
            parent=None if delta is None else version - 1,
            files={name: self.blobs.put(data) for name, data in sorted(files.items())},
            num_bytes=sum(map(len, files.values())),
        )
        manifest = msgspec.json.format(msgspec.json.encode(snapshot, order="deterministic"), indent=1) + b"\n"
        if not self._create(version, manifest):
            return self._standing(snapshot, weights)
        self._held = (version, weights)
        return snapshot

    def _standing(self, snapshot: Snapshot, weights: Weights) -> Snapshot:
        """The manifest that stands, if it is of this publication. Raises `VersionTaken`."""
        version = snapshot.version
        standing = self.manifest(version)
        files = {name: hashlib.sha256(data).hexdigest() for name, data in side_files(weights).items()}
        side = {name: blob for name, blob in standing.files.items() if name not in (WEIGHTS_FILE, DELTA_FILE)}
        same = standing.tensors == snapshot.tensors and side == files
        if not same or standing.batch != snapshot.batch:
            what = "another batch" if same else "other weights"
            raise VersionTaken(
                f"version {version} stands already, from {what} (run {standing.run_id}, step {standing.step}): "
                "two learners write to this store, or a redo was not exact"
            )
        self._held = (version, weights)
        return standing

    def _base(self, previous: Snapshot) -> _Base | None:
        """What the next delta starts from; None where a keyframe is due, or where the version before cannot be read."""
        try:
            chain = self._chain(previous)
            if len(chain) >= self._keyframe_every:
                return None
            weights = self._held[1] if self._held and self._held[0] == previous.version else self._weights(previous)
        except StoreError:
            return None
        if any(tensor_hash(weights.tensors[name]) != value for name, value in previous.tensors.items()):
            return None
        return _Base(codec_tensors(weights), [link.num_bytes for link in chain if link.kind == "delta"])

    def _delta(self, base: _Base, tensors: dict[str, Tensor], num_side_bytes: int) -> bytes | None:
        """None where the chain would cost more than a keyframe."""
        delta = diff(base.tensors, tensors, threads=self._threads, compile_loops=_compile_loops(tensors))
        num_chain_bytes = sum(base.links_bytes) - num_side_bytes * len(base.links_bytes) + len(delta)
        return delta if num_chain_bytes <= sum(tensor.words.nbytes for tensor in tensors.values()) else None

    def _leads(self, delta: bytes, base: dict[str, Tensor]) -> bool:
        """A delta that does not lead where it should would stop every follower: it is tried before it is published."""
        try:
            for _ in apply_stream(BytesIO(delta), base, threads=self._threads, compile_loops=_compile_loops(base)):
                pass
        except DeltaError:
            return False
        return True

    def _chain(self, snapshot: Snapshot, until: int = -1) -> list[Snapshot]:
        """From `snapshot` down to its keyframe, or to the version that rests on version `until`.

        Raises `StoreError` for a chain that leads nowhere.
        """
        chain = [snapshot]
        while (link := chain[-1]).kind == "delta" and link.parent != until:
            if link.parent is None or not 0 <= link.parent < link.version:
                raise StoreError(f"the manifest of version {link.version} in {self} names {link.parent} as its base")
            chain.append(self.manifest(link.parent))
        return chain

    def head(self) -> int | None:
        return max(self._versions(), default=None)

    def versions(self) -> list[int]:
        """All of them, ascending."""
        return sorted(self._versions())

    def manifest(self, version: int) -> Snapshot:
        data = self._read(version)
        if data is None:
            raise StoreError(f"no version {version} in {self}: the newest is {self.head()}")
        try:
            snapshot = msgspec.json.decode(data, type=Snapshot)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(f"the manifest of version {version} in {self} is damaged: {error}") from None
        if snapshot.version != version:
            raise StoreError(f"the manifest of version {version} in {self} says version {snapshot.version}")
        return snapshot

    def load(self, version: int) -> Weights:
        weights = self._weights(self.manifest(version))
        self._held = (version, weights)
        return weights

    def _weights(self, snapshot: Snapshot) -> Weights:
        """By the chain from the held version, where it has one; else, or where that fails, from its keyframe."""
        held = self._held
        if held is not None and held[0] < snapshot.version:
            with suppress(StoreError):
                return self._descend(self._chain(snapshot, until=held[0]), held[1])
        return self._descend(self._chain(snapshot), None)

    def _descend(self, chain: list[Snapshot], base: Weights | None) -> Weights:
        """Apply the versions of `chain`, newest first, to `base`; without one the last of them is a keyframe."""
        for snapshot in reversed(chain):
            base = self._step(snapshot, base)
        assert base is not None
        return base

    def _step(self, snapshot: Snapshot, base: Weights | None) -> Weights:
        where = f"version {snapshot.version} in {self}"
        files = self._files(snapshot)
        if snapshot.kind == "full":
            tensors = read_weights_file(files.pop(WEIGHTS_FILE))
        else:
            assert base is not None
            old = codec_tensors(base)
            try:
                result = apply(files.pop(DELTA_FILE), old, threads=self._threads, compile_loops=_compile_loops(old))
            except DeltaError as error:
                raise StoreError(f"{where}: {error}") from None
            tensors = {name: array_of(tensor) for name, tensor in result.items()}
        for name in sorted(snapshot.tensors.keys() | tensors.keys()):
            if name not in tensors or name not in snapshot.tensors:
                raise StoreError(f"{where}: tensor {name} is not in both manifest and file")
            if tensor_hash(tensors[name]) != snapshot.tensors[name]:
                raise StoreError(f"{where}: tensor {name} is damaged")
        config = json.loads(files.pop(CONFIG_FILE))
        return Weights(config=config, tokenizer=files, tensors=tensors)

    def export(self, version: int, folder: Path) -> None:
        """Write the Hugging Face folder. Raises `StoreError` where `folder` holds something already."""
        snapshot = self.manifest(version)
        files = self._files(snapshot) if snapshot.kind == "full" else weights_files(self.load(version))
        if folder.exists() and any(folder.iterdir()):
            raise StoreError(f"{folder} is not empty: choose another folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-", ignore_cleanup_errors=True) as temporary:
            aside = Path(temporary) / folder.name
            aside.mkdir()
            for name, data in files.items():
                (aside / name).write_bytes(data)
            os.replace(aside, folder)

    def _files(self, snapshot: Snapshot) -> dict[str, bytes]:
        for required in (CONFIG_FILE, WEIGHTS_FILE if snapshot.kind == "full" else DELTA_FILE):
            if required not in snapshot.files:
                raise StoreError(f"the manifest of version {snapshot.version} in {self} names no {required}")
        try:
            return {name: self.blobs.get(blob) for name, blob in snapshot.files.items()}
        except BlobError as error:
            raise StoreError(f"version {snapshot.version} in {self}: {error}") from None


def _compile_loops(tensors: dict[str, Tensor]) -> bool | None:
    """For a small policy numpy is quicker than loading a compiler, and it spares each service 100 MB."""
    return None if sum(tensor.words.nbytes for tensor in tensors.values()) >= SMALL_BYTES else False


def _check_succession(previous: Snapshot, snapshot: Snapshot) -> None:
    """A version continues its predecessor: the same run, where both say which; the same model, the same tensors."""
    if previous.run_id and snapshot.run_id and previous.run_id != snapshot.run_id:
        raise VersionTaken(
            f"version {previous.version} is of run {previous.run_id}, not of {snapshot.run_id}: "
            "a store holds one run; publish this one to a store of its own"
        )
    if previous.model != snapshot.model or previous.tensors.keys() != snapshot.tensors.keys():
        raise StoreError(
            f"version {snapshot.version} is of another model than version {previous.version}: "
            "a store holds one model; publish this one to a store of its own"
        )


@final
class FolderStore(SnapshotStore):
    """Versions in a folder of a local disk, which any number of processes may share."""

    def __init__(self, folder: Path | str, *, keyframe_every: int = KEYFRAME_EVERY, threads: int = 1) -> None:
        """`threads`: of the codec. Raises `StoreError` for a `keyframe_every` below 1."""
        self.folder = Path(folder)
        self._manifests = self.folder / "versions"
        self._manifests.mkdir(parents=True, exist_ok=True)
        super().__init__(FolderBlobs(self.folder / "blobs"), keyframe_every=keyframe_every, threads=threads)

    def __str__(self) -> str:
        return str(self.folder)

    def published_s(self, version: int) -> float:
        """When a version appeared, in seconds since the epoch. Raises `StoreError` where there is none."""
        try:
            return self._path(version).stat().st_mtime
        except FileNotFoundError:
            raise StoreError(f"no version {version} in {self}: the newest is {self.head()}") from None

    def _path(self, version: int) -> Path:
        return self._manifests / manifest_name(version)

    def _create(self, version: int, manifest: bytes) -> bool:
        with _durable_temporary(self._manifests, manifest) as temporary:
            try:
                # A rename would replace what another writer has just committed; a link refuses to.
                os.link(temporary, self._path(version))
            except FileExistsError:
                return False
        _sync_folder(self._manifests)
        # The version stands, whatever becomes of the hint.
        with suppress(OSError), _durable_temporary(self.folder, f"{version}\n".encode()) as temporary:
            os.replace(temporary, self.folder / "HEAD")
        return True

    def _read(self, version: int) -> bytes | None:
        try:
            return self._path(version).read_bytes()
        except FileNotFoundError:
            return None

    def _versions(self) -> list[int]:
        return versions_among(os.listdir(self._manifests))


@final
class MemoryStore(SnapshotStore):
    """Versions in a dictionary, for tests and for trying an engine without a run folder."""

    def __init__(self, *, keyframe_every: int = KEYFRAME_EVERY) -> None:
        self._manifests: dict[int, bytes] = {}
        self._lock = threading.Lock()
        super().__init__(MemoryBlobs(), keyframe_every=keyframe_every)

    def __str__(self) -> str:
        return "memory"

    def _create(self, version: int, manifest: bytes) -> bool:
        with self._lock:
            if version in self._manifests:
                return False
            self._manifests[version] = manifest
            return True

    def _read(self, version: int) -> bytes | None:
        return self._manifests.get(version)

    def _versions(self) -> list[int]:
        return list(self._manifests)


@contextmanager
def _durable_temporary(folder: Path, data: bytes) -> Iterator[Path]:
    """A file with `data` on the disk, whole; its temporary name is gone afterwards."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def _sync_folder(folder: Path) -> None:
    """The name, too, survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
