"""The whole mill, small: real functions, real sandboxes, the shipped processes; each of them killed on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.small_repository import RECIPE, write_repository
from tidemill.core.journal import read_journal
from tidemill.core.metrics import read_metrics
from tidemill.run.folder import RunFolder

SERVICES = ("worker-0", "engine-0", "learner-0", "coordinator-0", "evaluator-0")
DEADLINE_S = 420.0


def tidemill(*arguments: str | Path, **options: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tidemill.run.cli", *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)  # type: ignore[call-overload]


def answer(*arguments: str | Path) -> tuple[int, str]:
    process = tidemill(*arguments)
    output, _ = process.communicate(timeout=DEADLINE_S)
    return process.returncode, output


def wait_for(condition: Callable[[], bool], what: str, process: "subprocess.Popen[str] | None" = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if process is not None and process.poll() is not None:
            pytest.fail(f"the run ended before {what}: {process.communicate()[0]}")
        assert time.monotonic() < deadline, f"waited too long until {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe beside a task set that was just made from a repository."""
    folder = tmp_path_factory.mktemp("mill")
    code, output = answer("tasks", "synth", write_repository(folder / "repository"), "-o", folder / "tasks")
    assert code == 0, output
    path = folder / "recipe.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def run(recipe: Path) -> RunFolder:
    """A run in which every service was killed once while it was at work."""
    folder = RunFolder(recipe.parent / "run")
    process = tidemill("run", recipe, "--out", folder.path)
    try:
        wait_for(lambda: folder.metrics.exists() and any(r["stage"] == "rl" for r in rows(folder)), "RL", process)
        for who in SERVICES:
            kill(folder, who, process)
        wait_for(lambda: process.poll() is not None, "its end")
        output = process.communicate()[0]
        assert process.returncode == 0, output
    finally:
        process.kill()
    return folder


def rows(folder: RunFolder) -> list[dict[str, float | int | str]]:
    return list(read_metrics(folder.metrics))


def kill(folder: RunFolder, who: str, process: "subprocess.Popen[str]") -> None:
    info = folder.service(who)
    if info is None:  # it has done its work already
        return
    os.kill(info.pid, signal.SIGKILL)

    def is_back() -> bool:
        now = folder.service(who)
        return process.poll() is not None or (now is not None and now.pid != info.pid)

    wait_for(is_back, f"{who} is back")


def test_every_update_was_made_once(run: RunFolder) -> None:
    journal = read_journal(run.journal)
    assert [batch.index for batch in journal.batches] == list(range(6))
    versions = [row["version"] for row in rows(run) if row["stage"] == "rl"]
    assert versions == list(range(1, 7))
    trained = [attempt for attempt in journal.attempts if attempt.id.startswith("rl-") and attempt.episode]
    assert len(trained) >= 24


def test_the_outside_audit_closes(run: RunFolder) -> None:
    code, output = answer("audit", run.path, "--json")
    report = json.loads(output)
    failed = [line for line in report["lines"] if line["ok"] is False]
    assert not failed
    assert code == 0
    looked_at = {line["name"] for line in report["lines"] if line["ok"]}
    assert {"accounting closes", "exactly once", "ages", "logprob parity", "versions chain"} <= looked_at


def test_the_evaluator_examined_first_and_last(run: RunFolder) -> None:
    found = [json.loads(line) for line in run.eval.read_text().splitlines()]
    assert {row["version"] for row in found} <= {0, 6}
    keys = [(row["version"], row["task_id"], row["sample"]) for row in found]
    assert len(keys) == len(set(keys))


def test_the_published_policy_loads_with_transformers(run: RunFolder, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tidemill.deltas.store import FolderStore

    FolderStore(run.store).export(6, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("return a + b", return_tensors="pt")
    assert model(**ids).logits.isfinite().all()


def test_a_report_is_one_page(run: RunFolder) -> None:
    code, output = answer("report", run.path)
    assert code == 0, output
    page = run.report.read_text()
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_finished_run_has_nothing_left_to_do(run: RunFolder, recipe: Path) -> None:
    before = rows(run)
    code, output = answer("run", recipe, "--out", run.path)
    assert code == 0, output
    assert rows(run) == before
    code, output = answer("status", run.path)
    assert code == 0 and "6 of 6" in output


def test_a_folder_of_another_recipe_is_refused(run: RunFolder, recipe: Path) -> None:
    code, output = answer("run", recipe, "--out", run.path, "--rl.peak-lr", "0.5")
    assert code == 1
    assert "another recipe" in output and output.count("\n") == 1


def test_a_control_starts_from_the_same_version_0_and_says_what_it_is(run: RunFolder, recipe: Path) -> None:
    control = RunFolder(recipe.parent / "control")
    none = ("--pretraining.num-steps", "0", "--demonstrations.num-episodes", "0", "--demonstrations.num-steps", "0")
    short = ("--rl.num-updates", "2", "--evaluation.num-tasks", "1")
    options = ("--start-from", run.path, "--rl.shuffled-rewards", *none, *short)
    code, output = answer("run", recipe, "--out", control.path, *options)
    assert code == 0, output
    same = [json.loads((folder.store / "versions/00000000.json").read_text())["tensors"] for folder in (run, control)]
    assert same[0] == same[1]
    code, output = answer("audit", control.path)
    assert code == 0, output
    assert "a control: the rewards of each batch were shuffled" in output


def test_a_killed_parent_leaves_nothing_and_the_run_goes_on(recipe: Path) -> None:
    folder = RunFolder(recipe.parent / "orphaned")
    arguments = ("run", recipe, "--out", folder.path, "--rl.num-updates", "2", "--evaluation.num-tasks", "1")
    process = tidemill(*arguments)
    wait_for(lambda: bool(folder.metrics.exists() and rows(folder)), "training has begun", process)
    code, output = answer(*arguments)
    assert code == 1 and "in use" in output
    process.kill()
    process.wait()
    wait_for(lambda: not processes_of(folder), "every process is gone")
    code, output = answer(*arguments)
    assert code == 0, output
    code, output = answer("audit", folder.path)
    assert code == 0, output


def processes_of(folder: RunFolder) -> list[str]:
    """Command lines that name the run, but for this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(folder.path) in words and "tidemill.run.services" in words:
            found.append(" ".join(words))
    return found
