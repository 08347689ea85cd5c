"""The tables for a claim of learning: what they price RL at, and what they say of evaluations that lie there."""

from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from support.benchmarks import benchmark
from support.eval_rows import rows
from support.synthetic_run import synthetic_run
from tidemill.reports.evaluation import EvalRow
from tidemill.reports.rundata import RunData


@pytest.fixture(scope="module")
def learning() -> ModuleType:
    return benchmark("learning")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("learning") / "run")


def write(path: Path, found: list[EvalRow]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in found))


def test_rl_costs_what_learner_and_rollouts_used_between_its_versions(learning: ModuleType, run: Path) -> None:
    data = RunData(run)
    length_s = data.versions[data.head] - data.versions[0]
    assert learning.rl_cpu_seconds(data) == pytest.approx((0.03 + 0.5 + 0.6 + 0.7) * length_s, rel=0.1)
    assert learning.cpu_seconds(data, data.versions[0], data.versions[data.head], ("learner",)) < 0.8 * length_s


def test_a_service_that_was_started_again_counts_from_zero(learning: ModuleType, run: Path) -> None:
    class Data:
        samples: list[dict[str, Any]] = [
            {"who": "worker-0", "at_s": at_s, "ticks": ticks, "ticks_per_s": 100, "pid": pid}
            for at_s, ticks, pid in [(1.0, 100, 1), (2.0, 300, 1), (3.0, 50, 2), (4.0, 90, 2)]
        ]

    assert learning.cpu_seconds(Data(), 1.5, 9.0) == pytest.approx(2.0 + 0.5 + 0.4)
    assert learning.cpu_seconds(Data(), 0.0, 9.0) == pytest.approx(3.9)
    assert learning.cpu_seconds(Data(), 0.0, 9.0, ("learner",)) == 0.0


def test_tables_of_what_is_there(learning: ModuleType, run: Path, tmp_path: Path) -> None:
    before = {task: [0, 0, 0, 0] for task in "abcdefgh"}
    after = before | {task: [1, 1, 1, 0] for task in "abcdef"}
    facts = {"num_tests": 2, "first_edit_correct": 0, "ast_equal": 1, "malformed_calls": 1}
    for name, rates in [("before", before), ("after", after), ("shuffled", before), ("blind", before)]:
        write(tmp_path / f"{name}.jsonl", rows(rates, package="toolz", **facts))
    write(tmp_path / "before-greedy.jsonl", rows({task: [0] for task in before}, **facts))
    write(tmp_path / "after-greedy.jsonl", rows({task: [1] for task in before}, **facts))
    (tmp_path / "before.about.json").write_text('{"split": "dev"}')
    lines = learning.tables(run, tmp_path)
    assert lines[0].startswith(f"{run}, split dev; ") and "held-out" not in "\n".join(lines)
    words = [line.split() for line in lines]
    solved = next(line for line in words if line[:2] == ["pass@1", "8"])
    assert (solved[2], solved[4], solved[6]) == ("0.000", "0.562", "+0.562")
    assert float(solved[-1]) == pytest.approx(2 / 2**6, abs=1e-4), "six tasks moved, all up"
    greedy = next(line for line in words if line[:3] == ["pass@1,", "greedy", "8"])
    assert (greedy[3], greedy[5], float(greedy[-1])) == ("0.000", "1.000", pytest.approx(0.0078, abs=1e-4))
    assert ["pass@1", "against", "RL,", "rewards", "shuffled", "8"] in [line[:6] for line in words]
    assert not any("more SFT" in line for line in lines), "nothing is told of what is not there"
    assert any(line[:2] == ["malformed", "calls"] for line in words)


def test_without_evaluations_there_is_no_table(learning: ModuleType, run: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"before\.jsonl"):
        learning.tables(run, tmp_path)
