"""What /proc tells about processes that are not ours to wait for."""

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process, its descendants, and those of its descendants that were waited for. 0 if it is gone."""
    total = 0
    waiting = [pid]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            total += sum(int(ticks) for ticks in fields[11:15])
            for children in (folder / "task").glob("*/children"):
                waiting += [int(word) for word in children.read_text().split()]
        except OSError:
            continue
    return total / TICKS_PER_S
