"""Control groups: memory, processes, CPU share, and the CPU seconds used. Version 1 or 2, whatever is delegated to us.

A sandbox's group lies under the group that we run in ourselves, so that it stays within what we were given.
"""

import errno
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, final

from tidemill.core.seams import SandboxLimits

PERIOD_US = 100_000
OWN_PROCESSES = 3
"""Processes of a sandbox that are not the command's: bwrap outside, init inside, the agent."""


@dataclass(frozen=True, kw_only=True)
class Cgroups:
    """Where groups can be made: controller → folder. Empty where nothing is delegated."""

    version: Literal[0, 1, 2]
    parents: Mapping[str, Path]

    def holds(self, controller: str) -> bool:
        return controller in self.parents

    def named(self, name: str) -> list[Path]:
        """The folders that `create` would make."""
        return list(dict.fromkeys(parent / name for parent in self.parents.values()))

    def create(self, name: str, limits: SandboxLimits) -> "Cgroup":
        """Raises `OSError` with nothing left."""
        group = Cgroup(version=self.version, folders={key: parent / name for key, parent in self.parents.items()})
        try:
            for folder in group.unique():
                folder.mkdir()
            for controller, file, value in _settings(self.version, limits):
                if controller in group.folders:
                    (group.folders[controller] / file).write_text(value)
        except BaseException:
            group.remove()
            raise
        return group


def _settings(version: int, limits: SandboxLimits) -> list[tuple[str, str, str]]:
    processes = str(limits.max_processes + OWN_PROCESSES)
    quota = str(int(limits.num_cpus * PERIOD_US))
    memory = str(limits.memory_bytes)
    if version == 1:
        return [
            ("memory", "memory.limit_in_bytes", memory),
            ("pids", "pids.max", processes),
            ("cpu", "cpu.cfs_period_us", str(PERIOD_US)),
            ("cpu", "cpu.cfs_quota_us", quota),
        ]
    return [
        ("memory", "memory.max", memory),
        ("memory", "memory.oom.group", "0"),
        ("pids", "pids.max", processes),
        ("cpu", "cpu.max", f"{quota} {PERIOD_US}"),
    ]


@final
@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """The group, or groups in version 1, of one sandbox."""

    version: int
    folders: Mapping[str, Path]

    def unique(self) -> list[Path]:
        return list(dict.fromkeys(self.folders.values()))

    def join_files(self) -> list[str]:
        return [str(folder / "cgroup.procs") for folder in self.unique()]

    def cpu_s(self) -> float | None:
        """CPU seconds used so far; None where it is not counted or the group is gone."""
        try:
            if self.version == 1:
                return int((self.folders["cpuacct"] / "cpuacct.usage").read_text()) / 1e9
            return _field(self.unique()[0] / "cpu.stat", "usage_usec") / 1e6
        except (KeyError, IndexError, OSError, ValueError):
            return None

    def oom_kills(self) -> int:
        """How often the kernel has killed something here for want of memory."""
        try:
            file = "memory.oom_control" if self.version == 1 else "memory.events"
            return _field(self.folders["memory"] / file, "oom_kill")
        except (KeyError, OSError, ValueError):
            return 0

    def remove(self, deadline_s: float = 5.0) -> int:
        """Kill what is left inside and take the groups away; returns how many. Idempotent."""
        return remove_folders(self.unique(), deadline_s)


def remove_folders(folders: list[Path], deadline_s: float = 5.0) -> int:
    """Kill what runs in these groups and remove them; returns how many there were."""
    removed = 0
    deadline = time.monotonic() + deadline_s
    for folder in folders:
        while True:
            try:
                folder.rmdir()
                removed += 1
                break
            except FileNotFoundError:
                break
            except OSError as error:
                # EBUSY: someone is inside, or is just leaving
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    break
                _kill_inside(folder)
                time.sleep(0.002)
    return removed


def _kill_inside(folder: Path) -> None:
    try:
        for word in (folder / "cgroup.procs").read_text().split():
            os.kill(int(word), signal.SIGKILL)
    except (OSError, ValueError):
        return


def _field(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    raise ValueError(f"{file} has no {name}")


# --- what is delegated ---------------------------------------------------------------------------------------

NONE = Cgroups(version=0, parents=MappingProxyType({}))


def detect(proc: Path = Path("/proc/self")) -> Cgroups:
    """Look at where we run, and try: a group counts as delegated only where one could really be made."""
    try:
        own = _own_groups((proc / "cgroup").read_text())
        mounts = _mounts((proc / "mountinfo").read_text())
    except OSError:
        return NONE
    parents: dict[str, Path] = {}
    for controller in ("memory", "pids", "cpu", "cpuacct"):
        if controller in own and controller in mounts:
            folder = _below(mounts[controller], own[controller])
            if folder is not None and _can_make(folder):
                parents[controller] = folder
    if parents:
        return Cgroups(version=1, parents=MappingProxyType(parents))
    if "" in own and "" in mounts:
        return _detect_unified(mounts[""], own[""])
    return NONE


def _detect_unified(mount: tuple[Path, str], own: str) -> Cgroups:
    """The nearest group, from ours upwards, whose children get controllers. Ours has processes in it (us), so that
    it may hand controllers down only where it is the root."""
    folder = _below(mount, own)
    while folder is not None and os.access(folder, os.W_OK):
        try:
            enabled = set((folder / "cgroup.subtree_control").read_text().split())
            wanted = {"memory", "pids", "cpu"} & set((folder / "cgroup.controllers").read_text().split())
            if not wanted <= enabled:
                try:
                    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(wanted)))
                    enabled = wanted
                except OSError:
                    wanted &= enabled
            if "memory" in wanted and _can_make(folder) and os.access(folder / "cgroup.procs", os.W_OK):
                return Cgroups(version=2, parents=MappingProxyType(dict.fromkeys(sorted(wanted), folder)))
        except OSError:
            pass
        folder = None if folder == mount[0] else folder.parent
    return NONE


def _own_groups(text: str) -> dict[str, str]:
    """Controller → path of our group; the unified hierarchy has the empty name."""
    own: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path
    return own


def _mounts(text: str) -> dict[str, tuple[Path, str]]:
    """Controller → (mount point, group at its root)."""
    mounts: dict[str, tuple[Path, str]] = {}
    for line in text.splitlines():
        fields, _, tail = line.partition(" - ")
        root, point = fields.split()[3:5]
        kind, _, options = tail.split()[:3]
        names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names:
            mounts[name] = (Path(point), root)
    return mounts


def _below(mount: tuple[Path, str], own: str) -> Path | None:
    point, root = mount
    relative = os.path.relpath(own, root)
    if relative.startswith(".."):  # a container that sees its own groups only
        relative = "."
    folder = point / relative
    return folder if folder.is_dir() else None


def _can_make(folder: Path) -> bool:
    try:
        os.rmdir(tempfile.mkdtemp(prefix="tidemill-probe-", dir=folder))
    except OSError:
        return False
    return True
