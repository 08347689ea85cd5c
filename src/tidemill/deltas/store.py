"""The weight store: blobs and one small manifest per version.

A version is committed by the exclusive creation of its manifest, and by nothing else: the payload is written first,
under the hashes of its bytes, then `versions/00000007.json` appears whole or not at all. Where two writers race for a
version exactly one wins. Retries are harmless: the same weights under the same version give the manifest that stands.

    STORE/blobs/ab/cdef…            config.json, model.safetensors, tokenizer files: shared by content
    STORE/versions/00000007.json    a `Snapshot`
    STORE/HEAD                      the newest version, as a hint for people; never read here
"""

import hashlib
import json
import os
import re
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

import msgspec
import xxhash
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from tidemill.core.blobs import FolderBlobs, MemoryBlobs
from tidemill.core.errors import BlobError, StoreError, VersionTaken
from tidemill.core.records import Array, Snapshot
from tidemill.core.seams import Blobs, Weights

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_MANIFEST_NAME = re.compile(r"(\d{8,})\.json")


def tensor_hash(array: Array) -> str:
    """xxh3-128 of a tensor's bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(array.data)


def weights_files(weights: Weights) -> dict[str, bytes]:
    """The Hugging Face folder of a policy, file name → content. Equal weights give equal bytes.

    Raises `StoreError` for a tensor that is not uint16 bit patterns, or a tokenizer file with a reserved name.
    """
    for name in weights.tokenizer:
        if name in (CONFIG_FILE, WEIGHTS_FILE) or name != Path(name).name or name in ("", ".", ".."):
            raise StoreError(f"{name!r} cannot be a tokenizer file: give it a plain name other than {CONFIG_FILE}")
    if not weights.tensors:
        raise StoreError("weights without tensors: publish a whole policy")
    arrays = {}
    for name, array in sorted(weights.tensors.items()):
        if array.dtype != "uint16":
            raise StoreError(f"tensor {name} is {array.dtype}: publish bfloat16 as uint16 bit patterns")
        try:
            arrays[name] = array.numpy()
        except ValueError as error:
            raise StoreError(f"tensor {name}: buffer and shape disagree: {error}") from None
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=list(a.shape), data_ptr=a.ctypes.data, data_len=a.nbytes)
        for name, a in arrays.items()
    }
    config = json.dumps(weights.config, indent=2, sort_keys=True) + "\n"
    return {
        **weights.tokenizer,
        CONFIG_FILE: config.encode(),
        WEIGHTS_FILE: bytes(serialize(specs, metadata={"format": "pt"})),
    }


def read_weights_file(data: bytes) -> dict[str, Array]:
    """Tensors of a `model.safetensors` in bfloat16. Raises `StoreError` for a cut-off file or another dtype."""
    try:
        entries = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise StoreError(f"{WEIGHTS_FILE} cannot be read: {error}") from None
    tensors = {}
    for name, entry in entries:
        if entry["dtype"] != "BF16":
            raise StoreError(f"tensor {name} is {entry['dtype']}: the store holds bfloat16")
        tensors[name] = Array(data=bytes(entry["data"]), dtype="uint16", shape=tuple(entry["shape"]))
    return tensors


class SnapshotStore(ABC):
    """What both stores share: everything but where the manifests lie."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs = blobs

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
        files = weights_files(weights)
        snapshot = Snapshot(
            version=version,
            kind="full",
            parent=None,
            files={name: self.blobs.put(data) for name, data in sorted(files.items())},
            tensors={name: tensor_hash(array) for name, array in sorted(weights.tensors.items())},
            num_bytes=sum(len(data) for data in files.values()),
            batch=batch,
            step=step,
            model=hashlib.sha256(files[CONFIG_FILE]).hexdigest(),
            run_id=run_id,
        )
        if previous is not None:
            _check_succession(previous, snapshot)
        manifest = msgspec.json.format(msgspec.json.encode(snapshot, order="deterministic"), indent=1) + b"\n"
        if self._create(version, manifest):
            return snapshot
        standing = self.manifest(version)
        if standing.files != snapshot.files or standing.batch != snapshot.batch:
            what = "another batch" if standing.batch != snapshot.batch else "other weights"
            raise VersionTaken(
                f"version {version} stands already, from {what} (run {standing.run_id}, step {standing.step}): "
                "two learners write to this store, or a redo was not exact"
            )
        return standing

    def head(self) -> int | None:
        return max(self._versions(), default=None)

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
        snapshot = self.manifest(version)
        files = self._files(snapshot)
        tensors = read_weights_file(files.pop(WEIGHTS_FILE))
        for name in sorted(snapshot.tensors.keys() | tensors.keys()):
            if name not in tensors or name not in snapshot.tensors:
                raise StoreError(f"version {version} in {self}: tensor {name} is not in both manifest and file")
            if tensor_hash(tensors[name]) != snapshot.tensors[name]:
                raise StoreError(f"version {version} in {self}: tensor {name} is damaged")
        config = json.loads(files.pop(CONFIG_FILE))
        return Weights(config=config, tokenizer=files, tensors=tensors)

    def export(self, version: int, folder: Path) -> None:
        """Write the Hugging Face folder. Raises `StoreError` where `folder` holds something already."""
        files = self._files(self.manifest(version))
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
        for required in (CONFIG_FILE, WEIGHTS_FILE):
            if required not in snapshot.files:
                raise StoreError(f"the manifest of version {snapshot.version} in {self} names no {required}")
        try:
            return {name: self.blobs.get(blob) for name, blob in snapshot.files.items()}
        except BlobError as error:
            raise StoreError(f"version {snapshot.version} in {self}: {error}") from None


def _check_succession(previous: Snapshot, snapshot: Snapshot) -> None:
    """A version continues its predecessor: the same model, the same tensors."""
    if previous.model != snapshot.model or previous.tensors.keys() != snapshot.tensors.keys():
        raise StoreError(
            f"version {snapshot.version} is of another model than version {previous.version}: "
            "a store holds one model; publish this one to a store of its own"
        )


@final
class FolderStore(SnapshotStore):
    """Versions in a folder of a local disk, which any number of processes may share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifests = folder / "versions"
        self._manifests.mkdir(parents=True, exist_ok=True)
        super().__init__(FolderBlobs(folder / "blobs"))

    def __str__(self) -> str:
        return str(self.folder)

    def _path(self, version: int) -> Path:
        return self._manifests / f"{version:08d}.json"

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
        matches = (_MANIFEST_NAME.fullmatch(name) for name in os.listdir(self._manifests))
        return [int(match[1]) for match in matches if match]


@final
class MemoryStore(SnapshotStore):
    """Versions in a dictionary, for tests and for trying an engine without a run folder."""

    def __init__(self) -> None:
        self._manifests: dict[int, bytes] = {}
        self._lock = threading.Lock()
        super().__init__(MemoryBlobs())

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
