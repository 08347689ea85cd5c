"""A task set on disk, as workers read it.

TASKS/tasks.jsonl     a `Task` a line
TASKS/layers.jsonl    a `Layer` a line
TASKS/manifest.json   what it was made from
TASKS/blobs/          workspaces (`Tree`)
TASKS/vault/          hidden verifiers, mode 0700: see `vault`
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, final

import msgspec

from tidemill.core.blobs import FolderBlobs, get_record, put_record
from tidemill.core.errors import BlobError, TaskError, UsageError
from tidemill.core.records import Layer, Record, Split, Task, Tree, digest
from tidemill.tasks.build import BuiltTask
from tidemill.tasks.vault import write_vault

R = TypeVar("R", bound=Record)


@final
class TaskSet:
    """Tasks, the layers that they run in, and their workspaces. Made by `load`."""

    def __init__(self, folder: Path, tasks: Sequence[Task], layers: Sequence[Layer]) -> None:
        self.folder = folder
        self.tasks = tuple(tasks)
        self.layers = {digest(layer): layer for layer in layers}
        self.blobs = FolderBlobs(folder / "blobs")
        self._by_id = {task.id: task for task in self.tasks}

    def task(self, task_id: str) -> Task:
        if task_id not in self._by_id:
            raise TaskError(f"{self.folder} has no task {task_id!r}: see `tidemill tasks show` for the ids")
        return self._by_id[task_id]

    def split(self, split: Split) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.split == split)

    def layer(self, task: Task) -> Layer:
        """Raises `TaskError` where the set does not bring the task's layer."""
        if task.layer is None or task.layer not in self.layers:
            raise TaskError(f"{self.folder} has no layer {task.layer} for task {task.id!r}: make the task set again")
        return self.layers[task.layer]

    def workspace(self, task: Task) -> Tree:
        """Raises `TaskError` where the snapshot is missing or damaged."""
        if task.repository is None:
            return Tree(files=())
        try:
            return get_record(self.blobs, task.repository, Tree)
        except BlobError as error:
            raise TaskError(f"the workspace of task {task.id!r} cannot be read: {error}") from error


def load(folder: Path) -> TaskSet:
    """Raises `TaskError` naming the file and the line where the set is missing or damaged."""
    if not (folder / "tasks.jsonl").exists():
        raise TaskError(f"{folder} is no task set (no tasks.jsonl): make one with `tidemill tasks synth`")
    tasks = _read_lines(folder / "tasks.jsonl", Task)
    layers = _read_lines(folder / "layers.jsonl", Layer)
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise TaskError(f"{folder / 'tasks.jsonl'} has task {task.id!r} twice: make the task set again")
        seen.add(task.id)
    return TaskSet(folder, tasks, layers)


def _read_lines(path: Path, kind: type[R]) -> list[R]:
    found: list[R] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise TaskError(f"{path}, line {number}: {error}; make the task set again") from error
    return found


def check_new(out: Path) -> None:
    """Raises `UsageError` where the out folder is there and not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: give another folder")


def write_task_set(out: Path, built: Sequence[tuple[BuiltTask, Layer]], manifest: str) -> TaskSet:
    """Write a whole set, or nothing: it is made beside `out` and then moved there."""
    check_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        blobs = FolderBlobs(temporary / "blobs")
        tasks: list[Task] = []
        layers: dict[str, Layer] = {}
        for item, layer in built:
            name = digest(layer)
            layers[name] = layer
            repository = put_record(blobs, item.workspace)
            tasks.append(msgspec.structs.replace(item.task, repository=repository, layer=name))
        write_vault(temporary / "vault", {item.task.id: item.verifier for item, _ in built})
        (temporary / "layers.jsonl").write_bytes(_lines([layers[name] for name in sorted(layers)]))
        (temporary / "manifest.json").write_text(manifest)
        (temporary / "tasks.jsonl").write_bytes(_lines(tasks))
        os.chmod(temporary, 0o755)
        if out.exists():
            out.rmdir()
        os.rename(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return load(out)


def _lines(records: Sequence[Record]) -> bytes:
    return b"".join(msgspec.json.encode(record, order="deterministic") + b"\n" for record in records)
