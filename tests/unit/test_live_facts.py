"""What the live view knows of a run, from its folder alone."""

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.synthetic_run import synthetic_run
from tidemill.core.events import EventLog
from tidemill.core.metrics import MetricsLog, read_metrics
from tidemill.reports.live.facts import Facts, Follower
from tidemill.reports.status import status, status_lines

END_S = 1_790_000_060.0


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("live") / "run")


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    return shutil.copytree(honest, tmp_path / "run")


@contextmanager
def owned(run: Path) -> Iterator[None]:
    """As by a living run with a service."""
    (run / "services").mkdir(exist_ok=True)
    service = {"who": "learner-0", "pid": 1, "start_ticks": 0, "started_s": END_S - 90, "port": None, "starts": 1}
    (run / "services" / "learner-0.json").write_bytes(msgspec.json.encode(service))
    handle = os.open(run / "lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(handle)


def look(run: Path, now_s: float = END_S) -> Facts:
    return Follower(run, run_id="synthetic-0", totals={"rl": 3}).look(now_s=now_s)


def supervisor_says(run: Path, what: str, **more: Any) -> None:
    """After all that the run's events tell."""
    log = EventLog(run / "events", "supervisor-0")
    log.write(what, from_s=END_S + 60, to_s=END_S + 60, **more)
    log.close()


def test_it_counts_as_status_does(honest: Path) -> None:
    facts, told = look(honest), status(honest)
    assert facts.counts is not None
    attempts = ("accepted", "trained", "queued", "rejected", "leased")
    assert {name: getattr(facts.counts, name) for name in attempts} == told["attempts"]
    assert list(facts.counts.demonstrations) == told["demonstrations"]
    assert facts.last == told["last_update"]
    assert {version: share for version, share, _ in facts.evaluations} == {
        version: one["pass_1"] for version, one in told["evaluations"].items()
    }
    assert (facts.state, facts.stage, facts.done, facts.total) == ("finished", "rl", 3, 3)


def test_rates_are_of_now(run: Path) -> None:
    (run / "store" / "versions" / "00000003.json").unlink()
    supervisor_says(run, "start", ids={"service": "learner-0"})
    now_s = float(read_metrics(run / "metrics.jsonl")[-1]["time_s"])
    with owned(run):
        facts = look(run, now_s)
    assert facts.state == "running" and facts.done == 2
    assert facts.cores["learner"] == pytest.approx(0.7, abs=0.01)
    assert facts.rollout_tokens_per_s is not None and facts.rollout_tokens_per_s > 0
    assert facts.eta_s is not None and 0 < facts.eta_s < 30
    assert facts.elapsed_s == now_s - (END_S - 90)


def test_a_resumed_learner_takes_its_rewards_back(run: Path) -> None:
    follower = Follower(run, run_id="synthetic-0")
    before = follower.look(now_s=END_S).rewards
    log = MetricsLog(run / "metrics.jsonl")
    log.truncate_after(21)
    assert follower.look(now_s=END_S).rewards == before[:1]
    log.write({"stage": "rl", "step": 22, "time_s": END_S, "reward_mean": 0.5})
    log.close()
    assert follower.look(now_s=END_S).rewards == (before[0], 0.5)


def test_the_end_is_reckoned_from_steps_of_the_same_stage(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "store" / "versions" / "00000003.json").unlink()
    log = MetricsLog(run / "metrics.jsonl")
    for step in range(1, 9):
        log.write({"stage": "sft", "step": step, "stage_step": float(step), "time_s": END_S - 8 + step, "nll": 1.0})
    log.close()
    with owned(run):
        assert look(run).stage == "rl" and look(run).eta_s is None


def test_a_killed_service_is_a_fault_and_a_stopped_one_is_none(run: Path) -> None:
    follower = Follower(run, run_id="synthetic-0")
    assert follower.look(now_s=END_S).fault is None
    log = EventLog(run / "events", "supervisor-0")
    log.write("stop", ids={"service": "engine-0"}, numbers={"exit_code": 143}, note="exit code 143")
    assert follower.look(now_s=END_S).fault is None
    log.write("stop", ids={"service": "worker-0"}, numbers={"exit_code": -9}, note="SIGKILL")
    log.write("start", ids={"service": "worker-0"}, numbers={"pid": 1, "starts": 2})
    log.close()
    facts = follower.look(now_s=END_S)
    assert facts.fault is not None and facts.fault.note == "SIGKILL"
    assert facts.news is not None and facts.news.what == "start"


def test_a_run_says_that_it_is_stopping_and_why_it_halted(run: Path) -> None:
    supervisor_says(run, "stopping", note="done")
    supervisor_says(run, "stop", ids={"service": "engine-0"}, numbers={"exit_code": 143})
    with owned(run):
        assert look(run).state == "stopping"
        assert Follower(run, run_id="synthetic-0").look(now_s=END_S, is_over=True).state == "finished"
    with sqlite3.connect(run / "journal.sqlite") as db:
        db.execute("INSERT INTO meta VALUES ('halted', 'the gradient is not finite')")
    facts = look(run)
    assert (facts.state, facts.cause) == ("halted", "the gradient is not finite")


@pytest.mark.parametrize("what, note", [("stopping", "stopped"), ("start", "")])
def test_a_last_version_that_is_still_examined_is_no_end(run: Path, what: str, note: str) -> None:
    """Ctrl-C, or a kill of the supervisor, while the evaluator has work left."""
    supervisor_says(run, what, note=note)
    with owned(run):
        assert Follower(run, run_id="synthetic-0").look(now_s=END_S, is_over=True).state == "stopped"
    assert look(run).state == "stopped"
    assert status_lines(run)[0].endswith("stopped, version 3 of 3") and not status(run)["finished"]


def test_before_there_is_anything(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    facts = look(tmp_path)
    assert (facts.state, facts.stage, facts.total, facts.counts) == ("stopped", "start", None, None)


def test_damaged_lines_are_passed_over(run: Path) -> None:
    for name in ("metrics.jsonl", "proc.jsonl", "eval.jsonl", "events/worker-0.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b"{broken\n\xff\n[]\n")
    assert look(run).last == look(run).last != {}
