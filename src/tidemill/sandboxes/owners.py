"""Who made what, so that what a killed process has left can be found and removed, and nothing else.

`FOLDER/LABEL/PID-START/N.json` names a sandbox's process and control groups; it is written before they are made.
A process is named by pid and start time: a pid alone is given again.
"""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import final

from tidemill.core.errors import UsageError
from tidemill.sandboxes.cgroups import remove_folders
from tidemill.sandboxes.processes import kill_tree


def start_ticks(pid: int) -> int | None:
    """Start time of a process, in clock ticks since the boot; None where there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def check_label(label: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", label) or label.startswith("."):
        raise UsageError(f"run label {label!r}: use 1 to 128 letters, digits, '-', '_' and '.'")
    return label


@final
class Owner:
    """The records of one tier object of this process."""

    def __init__(self, folder: Path, label: str) -> None:
        self.label = check_label(label)
        self.folder = folder / label
        pid = os.getpid()
        self.name = f"{pid}-{start_ticks(pid)}"
        self._own = self.folder / self.name
        self._num = 0

    def reserve(self) -> Path:
        """A new, empty record."""
        while True:
            self._num += 1
            path = self._own / f"{self._num}.json"
            try:
                self._own.mkdir(parents=True, exist_ok=True)
                path.touch(exist_ok=False)
            except FileExistsError:  # another tier object of this process counts here too
                continue
            except FileNotFoundError:  # a reaper took the empty folder away
                continue
            return path

    def note(self, path: Path, what: dict[str, object]) -> None:
        """Write a record, whole."""
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(what))
        aside.replace(path)

    def close(self) -> None:
        """Leave no folder, unless another tier object of this process still has records in it."""
        for folder in (self._own, self.folder):
            try:
                folder.rmdir()
            except OSError:
                return

    def reap(self) -> int:
        """Remove what dead owners of this label have left: processes, control groups, folders, records. Returns how
        many things that were."""
        removed = 0
        for folder in sorted(self.folder.glob("*-*")):
            pid, _, start = folder.name.partition("-")
            if not (pid.isdigit() and start.isdigit()) or start_ticks(int(pid)) == int(start):
                continue
            for path in sorted(folder.glob("*.json")):
                removed += _reap_record(path)
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other owners live in it, or no one ever did
            self.folder.rmdir()
        return removed


def _reap_record(path: Path) -> int:
    removed = 1
    try:
        record = json.loads(path.read_text() or "{}")
    except (OSError, ValueError):  # another reaper was quicker, or the owner died inside the write
        record = {}
    pid = record.get("pid")
    if pid is not None and start_ticks(pid) == record.get("start"):
        kill_tree(pid)
        removed += 1
    removed += remove_folders([Path(folder) for folder in record.get("cgroups", [])])
    path.unlink(missing_ok=True)
    return removed
