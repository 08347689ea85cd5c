"""The live view in a real terminal: whatever ends the run, the terminal is as it was before."""

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.live_process import IDLE
from tidemill.run import display, procfs
from tidemill.run.display import LiveView
from tidemill.run.folder import RunFolder

SCRIPT = Path(__file__).parents[1] / "support" / "live_process.py"
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
DEADLINE_S = 60.0


class Terminal:
    """A pseudo-terminal with a process that has it as its own, as under a shell."""

    def __init__(self, folder: Path, service: str, columns: int = 80) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns)
        self.before = termios.tcgetattr(slave)
        self.slave = slave

        def take() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), service],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=take,  # noqa: PLW1509 (there is no thread here)
            env={**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1"},
        )
        self.seen = b""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < until_s, f"waited too long for {what}: {self.seen[-2000:]!r}"
            self.read()

    def read(self) -> None:
        if select.select([self.master], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):
                self.seen += os.read(self.master, 65536)

    def ended(self) -> int:
        self.wait_for(lambda: self.process.poll() is not None, "its end")
        for _ in range(5):
            self.read()
        return self.process.returncode

    def assert_sane(self) -> None:
        assert termios.tcgetattr(self.slave) == self.before
        assert self.seen.count(ENTER) == self.seen.count(LEAVE) >= 1
        assert self.seen.rindex(LEAVE) > self.seen.rindex(ENTER)
        assert self.seen.rindex(SHOW) > self.seen.rindex(HIDE)

    def last_words(self) -> bytes:
        """What stands on the screen that the user comes back to."""
        return self.seen[self.seen.rindex(LEAVE) :]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(service: str = IDLE, **options: int) -> Terminal:
        made.append(Terminal(tmp_path / "run", service, **options))
        return made[-1]

    yield make
    for each in made:
        with contextlib.suppress(ProcessLookupError):
            each.process.kill()
        each.process.wait()
        os.close(each.master)
        os.close(each.slave)


def services(tmp_path: Path) -> list[int]:
    return [info.pid for info in RunFolder(tmp_path / "run").all_services()]


def test_ctrl_c_stops_the_run_and_gives_the_terminal_back(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    here = terminal()
    here.wait_for(lambda: b"running" in here.seen and len(services(tmp_path)) == 2, "the view")
    pids = services(tmp_path)
    os.write(here.master, b"\x03")
    assert here.ended() == 130
    here.assert_sane()
    assert here.last_words().count(b"stopped") == 2, "in the last view, and in the last line"
    assert all(procfs.read_process(pid) is None for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_leaves_no_trace(
    terminal: Callable[..., Terminal], tmp_path: Path, number: signal.Signals
) -> None:
    here = terminal()
    here.wait_for(lambda: b"running" in here.seen and len(services(tmp_path)) == 2, "the view")
    pids = services(tmp_path)
    here.process.send_signal(number)
    assert here.ended() in (130, 128 + number)
    here.assert_sane()
    assert all(procfs.read_process(pid) is None for pid in pids)


def test_a_killed_service_is_shown_and_the_view_goes_on(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    here = terminal()
    here.wait_for(lambda: len(services(tmp_path)) == 2 and b"running" in here.seen, "the services")
    worker = RunFolder(tmp_path / "run").service("worker-0")
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    here.wait_for(lambda: b"SIGKILL" in here.seen, "the fault in the view")
    assert LEAVE not in here.seen
    os.write(here.master, b"\x03")
    assert here.ended() == 130
    here.assert_sane()


def test_a_halt_is_told_on_the_screen_that_stays(terminal: Callable[..., Terminal]) -> None:
    here = terminal("raise SystemExit('no such file: model.safetensors')")
    assert here.ended() == 1
    here.assert_sane()
    assert b"halted: learner-0 ended 2 times" in here.last_words()


def test_a_resize_is_followed(terminal: Callable[..., Terminal]) -> None:
    here = terminal(columns=100)
    here.wait_for(lambda: b"running" in here.seen, "the view")
    here.resize(60)
    num_seen = len(here.seen)
    here.wait_for(lambda: here.seen.count(b"\x1b[H", num_seen) >= 3, "frames after it")
    frame = here.seen[num_seen:].split(b"\x1b[H")[-2].decode(errors="replace")
    lines = re.sub(r"\x1b\[[0-9;?]*[a-z]", "", frame).split("\n")
    assert max(len(line.rstrip("\r")) for line in lines) == 60
    os.write(here.master, b"\x03")
    assert here.ended() == 130
    here.assert_sane()


def test_ctrl_z_gives_the_terminal_to_the_shell_and_takes_it_again(terminal: Callable[..., Terminal]) -> None:
    here = terminal()
    here.wait_for(lambda: b"running" in here.seen, "the view")
    here.process.send_signal(signal.SIGTSTP)
    here.wait_for(lambda: here.seen.count(LEAVE) == 1, "the shell's screen")
    here.process.send_signal(signal.SIGCONT)
    here.wait_for(lambda: here.seen.count(ENTER) == 2, "the view again")
    os.write(here.master, b"\x03")
    assert here.ended() == 130
    here.assert_sane()


# --- without a terminal --------------------------------------------------------------------------------------


class Lines(list[str]):
    """A `Progress` that keeps what it is told."""

    num_ticks = 0

    def __call__(self, line: str) -> None:
        self.append(line)

    def tick(self) -> None:
        self.num_ticks += 1


def test_a_view_that_fails_gives_way_to_plain_lines() -> None:
    said = Lines()

    def look(width: int) -> str:
        raise KeyError("reward_mean")

    with LiveView(look, said) as view:  # type: ignore[arg-type]
        view.tick()
    assert said == ["the live view failed (KeyError: 'reward_mean'); plain lines from here on"]
    assert said.num_ticks == 1


def test_looking_less_often_keeps_it_within_its_share() -> None:
    now_s, looks = 0.0, []

    def look(width: int) -> str:
        looks.append(now_s)
        until_s = time.thread_time() + 0.05
        while time.thread_time() < until_s:
            pass
        return ""

    with LiveView(look, Lines(), clock=lambda: now_s) as view:  # type: ignore[arg-type]
        for second in range(20):
            now_s = float(second)
            view.tick()
    assert 2 <= len(looks) <= 6, "0.05 s of CPU a look, of 0.01 s a second; one look at the start, one at the end"


def test_only_a_terminal_that_can_be_drawn_on_gets_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    monkeypatch.setenv("TERM", "xterm")
    assert not display.can_draw()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert display.can_draw()
    monkeypatch.setenv("TERM", "dumb")
    assert not display.can_draw()
