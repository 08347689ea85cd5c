"""The file of one evaluation: a row per attempt, written whole, so that a killed evaluation goes on where it was.

FILE.jsonl        an `EvalRow` a line
FILE.about.json   what was examined, and how: an evaluation of anything else is refused
episodes/         beside it, the episodes by hash
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import msgspec

from tidemill.core.blobs import FolderBlobs, put_record
from tidemill.core.errors import UsageError
from tidemill.core.files import drop_cut_off_line, write_whole
from tidemill.core.records import Episode
from tidemill.reports.evaluation import EvalRow, read_rows

About = dict[str, Any]
"""Plain data. How many tasks and samples is not part of it: both may grow."""


@final
class Results:
    """One evaluation's file, held by this process alone. Made by `open_results`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._episodes = FolderBlobs(path.parent / "episodes")

    def rows(self) -> list[EvalRow]:
        return read_rows(self.path)

    def known(self) -> set[tuple[str, int]]:
        """(Task, sample) that need not be played again."""
        return {(row.task_id, row.sample) for row in self.rows() if row.outcome != "env_fault"}

    def keep(self, episode: Episode) -> str:
        """Its hash."""
        return put_record(self._episodes, episode)

    def add(self, row: EvalRow) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(msgspec.json.encode(row) + b"\n")


def about_file(path: Path) -> Path:
    return path.with_suffix(".about.json")


def read_about(path: Path) -> About:
    """Of the evaluation in `path`; empty where there is none. Raises `UsageError` for a damaged one."""
    try:
        return dict(json.loads(about_file(path).read_bytes()))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"{about_file(path)} is damaged ({error}): choose another --out") from None


@contextmanager
def open_results(path: Path, about: About) -> Iterator[Results]:
    """Begin an evaluation, or go on with one of the same `about`.

    Raises `UsageError` where the file holds an evaluation of something else, or is in use, or is damaged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{path} is being written by another evaluation: choose another --out") from None
        drop_cut_off_line(path)
        _check(path, about)
        write_whole(about_file(path), json.dumps(about, indent=1, sort_keys=True).encode())
        results = Results(path)
        try:
            results.rows()
        except ValueError as error:
            raise UsageError(f"{error}: choose another --out") from None
        yield results
    finally:
        os.close(handle)


def _check(path: Path, about: About) -> None:
    found = read_about(path)
    if not found and path.stat().st_size:
        raise UsageError(f"{path} is no evaluation of `tidemill eval`: choose another --out")
    plain = json.loads(json.dumps(about))
    for name in sorted(found.keys() | plain.keys()):
        if found and found.get(name) != plain.get(name):
            raise UsageError(
                f"{path} holds an evaluation with {name} {found.get(name)}, not {plain.get(name)}: choose another --out"
            )
