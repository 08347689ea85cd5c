"""The supervisor over tiny services: restarts, halts, ends, and a killed parent that leaves nothing."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidemill.core.errors import TrainingHalted
from tidemill.core.events import read_events
from tidemill.run import procfs
from tidemill.run.folder import RunFolder
from tidemill.run.supervisor import HALT_EXIT_CODE, RestartPolicy, Service, Supervisor, last_line

QUICK = RestartPolicy(max_restarts=3, first_pause_s=0.01, max_pause_s=0.05, stop_s=5.0)
IDLE = "import time\nwhile True: time.sleep(60)"


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", program)


def wait_for(condition: Callable[[], object], what: str, deadline_s: float = 20.0) -> None:
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, f"still waiting for {what}"
        time.sleep(0.01)


def lives(pid: int) -> bool:
    process = procfs.read_process(pid)
    return process is not None and process.state not in "ZX"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.prepare(recipe="a" * 64, recipe_name="test")
    return made


def told_end(folder: RunFolder) -> str:
    """What the events say of how the run ended."""
    return next(event.note for event in read_events(folder.events) if event.what == "stopping")


@contextlib.contextmanager
def running(supervisor: Supervisor) -> Iterator[list[object]]:
    """In a thread; what it returned or raised is in the list afterwards."""
    ends: list[object] = []

    def run() -> None:
        try:
            ends.append(supervisor.run())
        except TrainingHalted as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ends
    finally:
        supervisor.stop()
        thread.join(30)
        assert not thread.is_alive()


def test_the_run_is_done_when_its_enders_are(folder: RunFolder) -> None:
    services = [
        Service(who="coordinator-0", argv=python(IDLE)),
        Service(who="learner-0", argv=python("print('trained')"), ends_run=True),
    ]
    assert Supervisor(folder, services, policy=QUICK).run() == "done"
    assert told_end(folder) == "done"
    assert last_line(folder.log("learner-0")) == "trained"
    assert folder.all_services() == []
    assert folder.halt_cause() == ""


def test_a_killed_service_is_started_again_alone(folder: RunFolder) -> None:
    services = [Service(who="worker-0", argv=python(IDLE), port=20_100), Service(who="engine-0", argv=python(IDLE))]
    with running(Supervisor(folder, services, policy=QUICK)) as ends:
        wait_for(lambda: len(folder.all_services()) == 2, "two services")
        worker, engine = folder.service("worker-0"), folder.service("engine-0")
        assert worker is not None and engine is not None and worker.port == 20_100
        os.kill(worker.pid, signal.SIGKILL)
        wait_for(lambda: (new := folder.service("worker-0")) and new.pid != worker.pid, "a new worker")
        again, beside = folder.service("worker-0"), folder.service("engine-0")
        assert again is not None and again.starts == 2
        assert beside is not None and beside.pid == engine.pid
    assert ends == ["stopped"] and told_end(folder) == "stopped"
    assert not lives(again.pid) and not lives(engine.pid)
    whats = [(event.what, event.ids.get("service")) for event in read_events(folder.events)]
    assert whats.count(("start", "worker-0")) == 2 and whats.count(("start", "engine-0")) == 1


def test_a_service_knows_whether_it_was_started_before(folder: RunFolder) -> None:
    program = "import os, sys\nprint(os.environ['TIDEMILL_STARTS'])\nsys.exit(os.environ['TIDEMILL_STARTS'] < '3')"
    assert Supervisor(folder, [Service(who="s-0", argv=python(program), ends_run=True)], policy=QUICK).run() == "done"
    lines = folder.log("s-0").read_text().splitlines()
    assert [line for line in lines if not line.startswith("---")] == ["1", "2", "3"]


def test_a_service_that_keeps_dying_halts_the_run(folder: RunFolder) -> None:
    services = [Service(who="engine-0", argv=python("raise SystemExit('no such file: model.safetensors')"))]
    with pytest.raises(TrainingHalted, match=r"engine-0 ended 4 times .* exit code 1: no such file"):
        Supervisor(folder, services, policy=QUICK).run()
    assert "model.safetensors" in folder.halt_cause() and told_end(folder) == "halted"


def test_a_halt_stops_the_run_with_its_cause(folder: RunFolder) -> None:
    other = Service(who="worker-0", argv=python(IDLE))
    told = f"import sys\nopen({str(folder.halted_file)!r}, 'w').write('the loss is NaN')\nsys.exit({HALT_EXIT_CODE})"
    with pytest.raises(TrainingHalted, match=r"^the loss is NaN$"):
        Supervisor(folder, [other, Service(who="learner-0", argv=python(told))], policy=QUICK).run()
    silent = f"import sys\nprint('halted: loss is inf')\nsys.exit({HALT_EXIT_CODE})"
    with pytest.raises(TrainingHalted, match=r"^learner-0: halted: loss is inf$"):
        Supervisor(folder, [other, Service(who="learner-0", argv=python(silent))], policy=QUICK).run()
    assert folder.all_services() == []


def test_stop_asks_first_and_then_makes(folder: RunFolder) -> None:
    polite = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: (print('goodbye', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(60)"
    )
    deaf = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\nwhile True: time.sleep(60)"
    )
    services = [Service(who="polite-0", argv=python(polite)), Service(who="deaf-0", argv=python(deaf))]
    policy = RestartPolicy(stop_s=0.5)
    with running(Supervisor(folder, services, policy=policy)) as ends:
        for who in ("polite-0", "deaf-0"):
            wait_for(lambda who=who: folder.log(who).exists() and last_line(folder.log(who)) == "ready", who)
        pids = [info.pid for info in folder.all_services()]
    assert ends == ["stopped"]
    assert last_line(folder.log("polite-0")) == "goodbye"
    assert not any(map(lives, pids))


def test_what_a_service_used_is_sampled_with_its_children(folder: RunFolder) -> None:
    burn = "import os, time\nuntil = time.process_time() + 0.3\nwhile time.process_time() < until: pass\n"
    program = (
        f"import os, time\nif os.fork() == 0:\n  exec({burn!r}); os._exit(0)\nos.wait()\nwhile True: time.sleep(60)"
    )

    def samples() -> list[dict[str, float]]:
        return [json.loads(line) for line in folder.proc.read_bytes().splitlines()] if folder.proc.exists() else []

    with running(Supervisor(folder, [Service(who="worker-0", argv=python(program))], policy=QUICK)):
        wait_for(lambda: any(s["ticks"] / s["ticks_per_s"] >= 0.29 for s in samples()), "the child's CPU time")
    assert {s["who"] for s in samples()} == {"worker-0"}
    assert all(s["rss_bytes"] > 0 and s["at_s"] > 1e9 and s["num_processes"] >= 1 for s in samples())


FAMILY = """
import subprocess, sys, time
idle = [sys.executable, "-S", "-c", "import time\\nwhile True: time.sleep(60)"]
child, loner = subprocess.Popen(idle), subprocess.Popen(idle, start_new_session=True)
print(child.pid, loner.pid, flush=True)
while True: time.sleep(60)
"""

PARENT = """
import pathlib, sys
from tidemill.run.folder import RunFolder
from tidemill.run.supervisor import Service, Supervisor
folder = RunFolder(pathlib.Path(sys.argv[1]))
with folder.lock():
    print(Supervisor(folder, [Service(who="worker-0", argv=(sys.executable, "-S", "-c", sys.argv[2]))]).run())
"""


@contextlib.contextmanager
def supervisor_process(folder: RunFolder) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A supervisor of its own, and the processes of its service, its child and its grandchild."""
    argv = [sys.executable, "-c", PARENT, str(folder.path), FAMILY]
    parent = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        log = folder.log("worker-0")
        wait_for(lambda: log.exists() and last_line(log)[:1].isdigit(), "the service's family")
        wait_for(lambda: folder.service("worker-0"), "its announcement")
        info = folder.service("worker-0")
        assert info is not None
        family = [info.pid, *map(int, last_line(log).split())]
        assert all(map(lives, family))
        yield parent, family
    finally:
        parent.kill()
        parent.communicate()


def test_a_killed_supervisor_leaves_nothing(folder: RunFolder) -> None:
    with supervisor_process(folder) as (parent, family):
        os.kill(parent.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(lives, family)), "the end of everything", deadline_s=10)


def test_a_stopped_supervisor_leaves_nothing(folder: RunFolder) -> None:
    with supervisor_process(folder) as (parent, family):
        os.kill(parent.pid, signal.SIGTERM)
        assert parent.communicate(timeout=20)[0] == "stopped\n"
        assert parent.returncode == 0
        assert not any(map(lives, family))


def test_the_next_start_reaps_what_was_left(folder: RunFolder) -> None:
    """Where even the keeper was killed."""
    label = f"{folder.path}#earlier"
    orphan = subprocess.Popen(python(IDLE), env={procfs.LABEL: label}, start_new_session=True)
    try:
        ender = Service(who="learner-0", argv=python(""), ends_run=True)
        wait_for(lambda: procfs.read_process(orphan.pid), "the orphan")
        assert Supervisor(folder, [ender], policy=QUICK).run() == "done"
        assert orphan.wait(10) == -signal.SIGKILL
        assert "reap" in {event.what for event in read_events(folder.events)}
    finally:
        orphan.kill()
        orphan.wait()


def test_a_process_with_a_recycled_id_is_left_alone(folder: RunFolder) -> None:
    stranger = subprocess.Popen(python(IDLE), start_new_session=True)
    try:
        process = procfs.read_process(stranger.pid)
        assert process is not None
        assert procfs.reap("no such label", [(stranger.pid, process.start_ticks + 1)]) == 0
        assert stranger.poll() is None
        assert procfs.reap("no such label", [(stranger.pid, process.start_ticks)]) == 1
        assert stranger.wait(10) == -signal.SIGKILL
    finally:
        stranger.kill()
        stranger.wait()


def test_service_names_must_differ(folder: RunFolder) -> None:
    twice = [Service(who="worker-0", argv=("true",))] * 2
    with pytest.raises(ValueError, match="must differ"):
        Supervisor(folder, twice)
    with pytest.raises(ValueError, match="no slash"):
        Service(who="a/b", argv=("true",))
