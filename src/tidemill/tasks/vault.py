"""Hidden verifiers, apart from all that an agent or its harness may read. Only the grader opens a vault."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

import msgspec

from tidemill.core.blobs import FolderBlobs, get_record, put_record
from tidemill.core.errors import BlobError, TaskError
from tidemill.core.records import Verifier


@final
class MemoryVault:
    """Verifiers in a dictionary, for tests and for tasks made on the spot."""

    def __init__(self, verifiers: Iterable[Verifier] = ()) -> None:
        self._verifiers = {item.task_id: item for item in verifiers}

    def verifier(self, task_id: str) -> Verifier:
        if task_id not in self._verifiers:
            raise TaskError(f"the vault has no verifier for task {task_id!r}")
        return self._verifiers[task_id]


@final
class FolderVault:
    """A folder of mode 0700: `index.json` (task id → blob) and `blobs/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "index.json"
        try:
            self._index = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except OSError as error:
            raise TaskError(f"cannot open the vault {folder}: {error.strerror}: {path.name}") from error
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TaskError(f"the vault's index {path} is damaged: {error}; make the task set again") from error
        self._blobs = FolderBlobs(folder / "blobs")

    def verifier(self, task_id: str) -> Verifier:
        name = self._index.get(task_id)
        if name is None:
            raise TaskError(f"the vault {self.folder} has no verifier for task {task_id!r}")
        try:
            return get_record(self._blobs, name, Verifier)
        except BlobError as error:
            raise TaskError(f"the verifier of task {task_id!r} cannot be read: {error}") from error


def write_vault(folder: Path, verifiers: Mapping[str, Verifier]) -> None:
    """Make a vault of these. The index is written last, so that a vault that opens is whole."""
    folder.mkdir(mode=0o700)
    os.chmod(folder, 0o700)
    blobs = FolderBlobs(folder / "blobs")
    index = {task_id: put_record(blobs, verifiers[task_id]) for task_id in sorted(verifiers)}
    (folder / "index.json").write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1))
