"""What a main loop sleeps by: a wait that a signal, a child's death or another thread ends at once."""

import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import final

BLIND_WAIT_S = 0.05
"""Outside the main thread, where no signal tells of a child's death."""


@final
class Bell:
    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def ring(self) -> None:
        """Safe in any thread and in a signal handler."""
        with suppress(OSError):  # it rings already, or is put away
            self._writer.send(b"x")

    def wait(self, seconds: float) -> None:
        """Until it rings, at most so long; it may return early."""
        limit_s = seconds if _in_main_thread() else min(seconds, BLIND_WAIT_S)
        select.select([self._reader], [], [], max(0.0, limit_s))
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    @contextmanager
    def rung_by_signals(self, stop: Callable[[], None]) -> Iterator[None]:
        """Within this block signals ring it, where this is the main thread; SIGINT and SIGTERM call `stop`, too. The
        bell is put away afterwards."""
        with self._reader, self._writer:
            if not _in_main_thread():
                yield
                return

            def handle(number: int, frame: FrameType | None) -> None:
                if number != signal.SIGCHLD:
                    stop()

            handled = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
            before = {number: signal.signal(number, handle) for number in handled}
            wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(wakeup_before)
                for number, handler in before.items():
                    signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
