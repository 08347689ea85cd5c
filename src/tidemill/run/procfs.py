"""Processes of this machine, from `/proc`: who descends from whom, what they use, and how to end all of a run.

A process belongs to a run where its environment carries the run's label, or where it is in the process group of a
recorded service. Standard library only: the keeper starts in a few milliseconds.
"""

import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

LABEL = "TIDEMILL_RUN"
"""Environment variable that marks every process of a run: the run folder's path, `#`, a mark of its supervisor."""

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Process:
    pid: int
    state: str
    """`R`, `S`, … ; `Z`: dead, not yet waited for."""
    parent: int
    group: int
    session: int
    ticks: int
    """CPU time of itself and of the children that it has waited for, user and system."""
    start_ticks: int
    """Since boot."""
    rss_bytes: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Of a process and all that descend from it."""

    ticks: int
    rss_bytes: int
    num_processes: int


def read_process(pid: int) -> Process | None:
    """None where there is no such process (any more), or no `/proc`."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and parentheses
    return Process(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        ticks=sum(int(field) for field in fields[11:15]),
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


def read_processes() -> dict[int, Process]:
    """All that live now; empty where there is no `/proc`."""
    if not PROC.is_dir():
        return {}
    found = (read_process(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return {process.pid: process for process in found if process is not None}


def usage(processes: Mapping[int, Process], root: int) -> Usage:
    """Of `root`, its descendants, and what else is in its session (a descendant whose parent is gone)."""
    members = {root} if root in processes else set()
    members |= {pid for pid, process in processes.items() if process.session == root}
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    to_visit = list(members)
    while to_visit:
        for child in children.get(to_visit.pop(), []):
            if child not in members:
                members.add(child)
                to_visit.append(child)
    return Usage(
        ticks=sum(processes[pid].ticks for pid in members),
        rss_bytes=sum(processes[pid].rss_bytes for pid in members),
        num_processes=len(members),
    )


def reap(label: str, groups: Iterable[tuple[int, int]], *, deadline_s: float = 10.0) -> int:
    """End (SIGKILL) every process of a run but this one and its ancestors; returns how many there were.

    label: the value of `LABEL`, or its beginning. groups: (process id, start ticks) of recorded service leaders.
    Returns when nothing of them is left, or at the
    deadline (a process in the kernel's uninterruptible sleep cannot be ended by anyone).
    """
    recorded = list(groups)
    seen: set[int] = set()
    until_s = time.monotonic() + deadline_s
    while victims := _members(label, recorded):
        seen |= victims
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > until_s:
            break
        time.sleep(0.01)
    return len(seen)


def _members(label: str, groups: list[tuple[int, int]]) -> set[int]:
    processes = read_processes()
    spared = _ancestors(processes, os.getpid())
    # A process id that was given to another since is told by its start; while a group has members, its id is not
    # given away, so that a leader who is gone needs no telling.
    living = {
        leader
        for leader, start_ticks in groups
        if leader not in processes or processes[leader].start_ticks == start_ticks
    }
    mark = f"{LABEL}={label}".encode()
    found = set()
    for pid, process in processes.items():
        if pid in spared or process.state in "ZX":
            continue
        if process.group in living or any(item.startswith(mark) for item in _environment(pid)):
            found.add(pid)
    return found


def _environment(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []  # another user's, or gone


def _ancestors(processes: Mapping[int, Process], pid: int) -> set[int]:
    found = set()
    while pid in processes and pid not in found:
        found.add(pid)
        pid = processes[pid].parent
    return found
