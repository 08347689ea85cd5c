"""`metrics.jsonl`: whole lines, whatever kills the learner, and each step once."""

from pathlib import Path

import pytest

from tidemill.core.metrics import MetricsLog, read_metrics


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    log.write({"step": 1, "stage": "sft", "loss": 0.5})
    log.write({"step": 2, "stage": "rl", "loss": -0.25, "version": 1})
    assert read_metrics(log.path) == [
        {"step": 1, "stage": "sft", "loss": 0.5},
        {"step": 2, "stage": "rl", "loss": -0.25, "version": 1},
    ]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,"loss":1.0}\n{"step":2,"lo')
    assert [row["step"] for row in read_metrics(path)] == [1]
    log = MetricsLog(path)
    log.write({"step": 2, "loss": 2.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert path.read_bytes().count(b"\n") == 2


def test_steps_done_again_stand_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": float(step)})
    log.close()
    log = MetricsLog(path)
    with pytest.raises(ValueError, match="step 2 does not follow step 3"):
        log.write({"step": 2, "loss": 20.0})
    assert log.truncate_after(1) == 2
    log.write({"step": 2, "loss": 20.0})
    assert [row["loss"] for row in read_metrics(path)] == [1.0, 20.0]
    assert log.truncate_after(2) == 0
    assert log.truncate_after(0) == 2
    log.write({"step": 1})
    assert read_metrics(path) == [{"step": 1}]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("row", [{"loss": 1.0}, {"step": 1.5}, {"step": 0}, {"step": 1, "loss": float("nan")}], ids=str)
def test_a_row_that_cannot_be_read_again_is_refused(tmp_path: Path, row: dict[str, float]) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"step|nan"):
        log.write(row)
    assert read_metrics(log.path) == []


def test_a_bad_line_in_the_middle_raises(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\nnonsense\n{"step":2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)
