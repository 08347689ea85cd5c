"""What /proc tells about processes that are not ours to wait for."""

import contextlib
import os
import signal
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """The process and all below it, parents first."""
    found = [pid]
    for each in found:  # grows while we go
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(word) for word in children.read_text().split()]
    return found


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process, its descendants, and those of its descendants that were waited for. 0 if it is gone."""
    total = 0
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(ticks) for ticks in fields[11:15])
    return total / TICKS_PER_S


def is_running(pid: int) -> bool:
    """False for a zombie: nothing of it is left but its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill_tree(pid: int, deadline_s: float = 5.0) -> None:
    """Kill a process and what descends from it (stopped first, so that nothing is born meanwhile); gone on return."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    targets = descendants(pid)
    for each in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    deadline = time.monotonic() + deadline_s
    while any(is_running(each) for each in targets) and time.monotonic() < deadline:
        time.sleep(0.002)


def running_in(folder: Path) -> list[int]:
    """Processes whose working folder is here or below."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if folder in (here := Path(os.readlink(entry / "cwd"))).parents or here == folder:
                    found.append(int(entry.name))
    return found
