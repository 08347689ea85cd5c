"""What outlives a supervisor that is killed, just long enough to end everything that it had started.

    python -m tidemill.run.keeper LABEL      reads `+PID START_TICKS` and `-PID` lines; at their end, reaps and exits

The kernel ends each service with its supervisor (PR_SET_PDEATHSIG), but not the processes that the service had
started. The supervisor holds the other end of our standard input, so that its end, however it comes, is ours to see.
"""

import os
import signal
import stat
import sys
import threading

from tidemill.run.procfs import reap


def main() -> None:
    label = sys.argv[1]
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: dict[int, int] = {}
    for line in sys.stdin:
        fields = line.split()
        if line.startswith("+") and len(fields) == 2:
            groups[int(fields[0])] = int(fields[1])
        elif line.startswith("-"):
            groups.pop(int(fields[0][1:]), None)
    reap(label, groups.items())


def end_with_supervisor() -> None:
    """Called first by a service: where its supervisor goes away, the service and its process group end at once.

    Needed where the kernel cannot do it (not Linux); harmless elsewhere, and where a service is run by hand.
    """
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-supervisor", daemon=True).start()


if __name__ == "__main__":
    main()
