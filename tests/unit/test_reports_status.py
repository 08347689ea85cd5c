"""`tidemill status`, from files alone."""

import fcntl
import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from support.synthetic_run import synthetic_run
from tidemill.core.errors import RunFolderError
from tidemill.reports.status import status, status_lines


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("status") / "run")


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    return shutil.copytree(honest, tmp_path / "run")


def test_a_finished_run(honest: Path) -> None:
    lines = status_lines(honest)
    assert lines[0] == "synthetic-0: finished, version 3 of 3"
    assert "attempts     14 accepted = 12 trained + 0 queued + 2 rejected; 0 under way" in lines
    assert any(line.startswith("last update  step 23 (rl): reward_mean") for line in lines)
    assert sum(line.startswith("evaluation   version") for line in lines) == 2
    assert any(line.startswith("learner-0") for line in lines)
    json.dumps(status(honest))


def test_a_running_run(run: Path) -> None:
    handle = os.open(run / "lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert status_lines(run)[0].endswith("running, version 3 of 3")
    finally:
        os.close(handle)


def test_what_is_not_trained_yet_is_queued(run: Path) -> None:
    (run / "store" / "versions" / "00000003.json").unlink()
    attempts = status(run)["attempts"]
    assert attempts == {"accepted": 14, "trained": 8, "queued": 4, "rejected": 2, "leased": 0}
    assert status_lines(run)[0].endswith("stopped, version 2 of 3")


def test_a_halted_run_says_why(run: Path) -> None:
    with sqlite3.connect(run / "journal.sqlite") as db:
        db.execute("INSERT INTO meta VALUES ('halted', 'the gradient is not finite')")
    lines = status_lines(run)
    assert lines[0].startswith("synthetic-0: halted")
    assert lines[1] == "cause        the gradient is not finite"


def test_before_version_0(run: Path) -> None:
    shutil.rmtree(run / "store")
    assert any("2 of 2 demonstrations; version 0 is not there yet" in line for line in status_lines(run))


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is no run"):
        status_lines(tmp_path)
