"""The bell that ends a wait: rung by a thread, a signal, a child's death."""

import os
import signal
import subprocess
import sys
import threading
import time

from tidemill.run.bell import Bell

LONG_S = 30.0


def waited_s(bell: Bell) -> float:
    start_s = time.monotonic()
    bell.wait(LONG_S)
    return time.monotonic() - start_s


def test_a_thread_ends_the_wait_and_the_next_one_waits_again() -> None:
    bell = Bell()
    with bell.rung_by_signals(lambda: None):
        threading.Timer(0.01, bell.ring).start()
        assert waited_s(bell) < LONG_S / 2
        start_s = time.monotonic()
        bell.wait(0.05)
        assert time.monotonic() - start_s >= 0.04
    bell.ring()  # it is put away: nothing happens


def test_a_stop_is_asked_for_and_a_child_s_death_is_none() -> None:
    bell, asked, before = Bell(), [], signal.getsignal(signal.SIGTERM)
    with bell.rung_by_signals(lambda: asked.append(1)):
        child = subprocess.Popen([sys.executable, "-S", "-c", ""])
        assert waited_s(bell) < LONG_S / 2
        child.wait()
        assert asked == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert waited_s(bell) < LONG_S / 2
        assert asked == [1]
    assert signal.getsignal(signal.SIGTERM) == before
