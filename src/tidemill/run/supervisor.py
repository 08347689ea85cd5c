"""Starts the services of a run as processes, starts again what dies, and ends all of it with the run.

| what happens                          | what follows                                                          |
|---------------------------------------|-----------------------------------------------------------------------|
| a service dies (kill -9, exit code)   | it alone is started again, after a growing pause                      |
| it dies too often                     | the run halts, with the service and the last line of its log as cause |
| a service exits with HALT_EXIT_CODE   | the run halts, with the cause from RUN/halted or the last log line    |
| every service that `ends_run` exits 0 | the run is done: the others are stopped                               |
| SIGINT or SIGTERM                     | everyone is asked to stop, then made to                               |
| this process is killed                | the keeper and the kernel end everything; the next start reaps first  |
"""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

import msgspec

from tidemill.core.errors import TrainingHalted
from tidemill.core.events import EventLog
from tidemill.run import procfs
from tidemill.run.bell import Bell
from tidemill.run.folder import RunFolder, ServiceInfo

HALT_EXIT_CODE = 64
"""A service that exits with it (`TrainingHalted`) is not started again: it stops the run."""

SAMPLE_EVERY_S = 1.0
PR_SET_PDEATHSIG = 1
STARTS = "TIDEMILL_STARTS"
"""Environment variable of a service: how often this supervisor has started it; 1 the first time."""

RunEnd = Literal["done", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Service:
    """One process of the run."""

    who: str
    """Such as `worker-0`."""
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own."""
    port: int | None = None
    """Where it listens; only told, in `services/<who>.json`."""
    ends_run: bool = False
    """Its exit with 0 is its end; the run is done when all such services have ended. Any other service that exits is
    started again."""

    def __post_init__(self) -> None:
        if not self.who or "/" in self.who:
            raise ValueError(f"service name {self.who!r}: it becomes a file name, so no slash")
        if not self.argv:
            raise ValueError(f"service {self.who} has no command")


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    max_restarts: int = 10
    """Of one service within `window_s`; one more halts the run."""
    window_s: float = 300.0
    first_pause_s: float = 0.25
    max_pause_s: float = 15.0
    stop_s: float = 15.0
    """Between asking a service to stop and making it."""


@final
class _Managed:
    """A service with its process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.deaths_s: list[float] = []
        self.start_at_s = 0.0
        self.ended = False


@final
class Supervisor:
    """Owns the processes of one run folder, whose lock the caller holds. `run` may be called once, in the main thread
    (elsewhere it cannot see signals: use `stop`)."""

    def __init__(
        self,
        folder: RunFolder,
        services: Sequence[Service],
        *,
        policy: RestartPolicy | None = None,
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        """`on_tick` is called about every second, for progress lines."""
        names = [service.who for service in services]
        if len(set(names)) != len(names):
            raise ValueError(f"service names must differ: {', '.join(names)}")
        self._folder = folder
        self._managed = [_Managed(service) for service in services]
        self._policy = policy or RestartPolicy()
        self._tick = on_tick or (lambda: None)
        # Of this supervisor alone: the keeper of an earlier one, still reaping, must not take ours for its own.
        self._label = f"{folder.path}#{secrets.token_hex(8)}"
        self._asked_to_stop = 0
        self._end: RunEnd | None = None
        self._bell = Bell()

    def run(self) -> RunEnd:
        """Until the run is done or stopped. Raises `TrainingHalted` with the cause where a failure stopped it."""
        with ExitStack() as stack:
            stack.enter_context(self._bell.rung_by_signals(self.stop))
            self._events = EventLog(self._folder.events, "supervisor-0")
            stack.callback(self._events.close)
            self._reap_earlier()
            self._folder.clear_halt()
            self._samples = stack.enter_context(self._folder.proc.open("ab", buffering=0))
            self._keeper = self._start_keeper()
            stack.callback(self._end_keeper)
            stack.callback(self._stop_all)
            try:
                self._end = self._watch()
                return self._end
            except TrainingHalted as error:
                self._folder.write_halt(str(error))
                self._events.write("fault", note=str(error))
                raise

    def stop(self) -> None:
        """Ask `run` to stop; a second time, to stop without grace. Safe in any thread and in a signal handler."""
        self._asked_to_stop += 1
        self._bell.ring()

    # --- the loop --------------------------------------------------------------------------------------------

    def _watch(self) -> RunEnd:
        next_sample_s = time.monotonic()
        while True:
            for managed in self._managed:
                self._look_after(managed)
            if self._asked_to_stop:
                return "stopped"
            enders = [managed for managed in self._managed if managed.service.ends_run]
            if enders and all(managed.ended for managed in enders):
                return "done"
            now_s = time.monotonic()
            if now_s >= next_sample_s:
                next_sample_s = max(next_sample_s + SAMPLE_EVERY_S, now_s)
                self._sample()
                self._tick()
            due_s = [m.start_at_s for m in self._managed if m.process is None and not m.ended]
            self._bell.wait(min([next_sample_s, *due_s]) - time.monotonic())

    def _look_after(self, managed: _Managed) -> None:
        if managed.ended:
            return
        if managed.process is None:
            if time.monotonic() >= managed.start_at_s:
                self._start(managed)
            return
        code = managed.process.poll()
        if code is None:
            return
        who = managed.service.who
        self._bury(managed)
        self._events.write("stop", ids={"service": who}, numbers={"exit_code": code}, note=_describe(code))
        if code == HALT_EXIT_CODE:
            raise TrainingHalted(self._folder.halt_cause() or f"{who}: {last_line(self._folder.log(who))}")
        if code == 0 and managed.service.ends_run:
            managed.ended = True
            return
        self._plan_restart(managed, code)

    def _plan_restart(self, managed: _Managed, code: int) -> None:
        now_s = time.monotonic()
        policy = self._policy
        managed.deaths_s = [at_s for at_s in managed.deaths_s if at_s > now_s - policy.window_s] + [now_s]
        num = len(managed.deaths_s)
        if num > policy.max_restarts:
            log = self._folder.log(managed.service.who)
            raise TrainingHalted(
                f"{managed.service.who} ended {num} times within {policy.window_s:.0f} s, last with "
                f"{_describe(code)}: {last_line(log)} (see {log})"
            )
        managed.start_at_s = now_s + min(policy.first_pause_s * 2 ** (num - 1), policy.max_pause_s)

    # --- processes -------------------------------------------------------------------------------------------

    def _start(self, managed: _Managed) -> None:
        service = managed.service
        managed.starts += 1
        log_path = self._folder.log(service.who)
        env = {
            **os.environ,
            **service.env,
            procfs.LABEL: self._label,
            STARTS: str(managed.starts),
            "PYTHONUNBUFFERED": "1",
        }
        with log_path.open("ab") as log:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"--- {stamp} start {managed.starts} of {service.who}\n".encode())
            log.flush()
            managed.process = subprocess.Popen(
                list(service.argv),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                preexec_fn=_ends_with_parent(),  # noqa: PLW1509 (no other thread here holds a lock)
            )
        pid = managed.process.pid
        process = procfs.read_process(pid)
        start_ticks = 0 if process is None else process.start_ticks
        self._tell_keeper(f"+{pid} {start_ticks}")
        self._folder.announce(
            ServiceInfo(
                who=service.who,
                pid=pid,
                start_ticks=start_ticks,
                started_s=time.time(),
                port=service.port,
                starts=managed.starts,
            )
        )
        self._events.write("start", ids={"service": service.who}, numbers={"pid": pid, "starts": managed.starts})

    def _bury(self, managed: _Managed) -> None:
        """A service is dead: so is everything in its process group."""
        assert managed.process is not None
        pid = managed.process.pid
        _kill_group(pid)
        if managed.process.stdin is not None:
            managed.process.stdin.close()
        managed.process = None
        self._tell_keeper(f"-{pid}")
        self._folder.forget(managed.service.who)

    def _stop_all(self) -> None:
        asked_before = self._asked_to_stop
        living = [managed for managed in self._managed if managed.process is not None]
        self._events.write("stopping", numbers={"services": len(living)}, note=self._end or "halted")
        for managed in living:
            assert managed.process is not None
            managed.process.terminate()
        until_s = time.monotonic() + self._policy.stop_s
        while living:
            for managed in list(living):
                assert managed.process is not None
                code = managed.process.poll()
                if code is None and (time.monotonic() > until_s or self._asked_to_stop > max(asked_before, 1)):
                    _kill_group(managed.process.pid)
                    code = managed.process.wait()
                if code is not None:
                    who = managed.service.who
                    self._bury(managed)
                    self._events.write("stop", ids={"service": who}, numbers={"exit_code": code}, note=_describe(code))
                    living.remove(managed)
            if living:
                with suppress(Exception):  # whatever a display does, the services are ended
                    self._tick()
                self._bell.wait(min(0.1, until_s - time.monotonic()))

    def _reap_earlier(self) -> None:
        """End what an earlier owner of this folder left behind, where it was killed together with its keeper."""
        left = [(info.pid, info.start_ticks) for info in self._folder.all_services()]
        num = procfs.reap(f"{self._folder.path}#", left)
        for info in self._folder.all_services():
            self._folder.forget(info.who)
        if num:
            self._events.write("reap", numbers={"processes": num})

    def _start_keeper(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "tidemill.run.keeper", self._label],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _tell_keeper(self, line: str) -> None:
        assert self._keeper.stdin is not None
        try:
            self._keeper.stdin.write(f"{line}\n".encode())
            self._keeper.stdin.flush()
        except BrokenPipeError:
            self._events.write("fault", note="the keeper is gone: only the kernel ends services with this process")

    def _end_keeper(self) -> None:
        """Its end of input is its order to reap: it also takes what services left in sessions of their own."""
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()
        self._keeper.wait()

    # --- watching --------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        """A line per living service into `proc.jsonl`: CPU ticks and memory of it and of all that descend from it."""
        processes = procfs.read_processes()
        now_s = time.time()
        lines = []
        for managed in self._managed:
            if managed.process is None or managed.process.pid not in processes:
                continue
            used = procfs.usage(processes, managed.process.pid)
            sample = {
                "at_s": now_s,
                "who": managed.service.who,
                "pid": managed.process.pid,
                "ticks": used.ticks,
                "ticks_per_s": os.sysconf("SC_CLK_TCK"),
                "rss_bytes": used.rss_bytes,
                "num_processes": used.num_processes,
            }
            lines.append(msgspec.json.encode(sample) + b"\n")
        self._samples.write(b"".join(lines))


def _ends_with_parent() -> Callable[[], None] | None:
    """What a child does between fork and exec: ask the kernel to end it with this process."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # it died before we asked

    return ask


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    except FileNotFoundError:
        return "no log"
    return next((line for line in reversed(lines) if line and not line.startswith("--- ")), "its log is empty")
