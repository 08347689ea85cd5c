"""The run folder: one recipe, one owner."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.core.errors import RunFolderError
from tidemill.run.folder import FIRST_PORT, NUM_PORTS, RunFolder, ServiceInfo, is_free


def test_a_folder_keeps_its_run_over_openings(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "one")
    with folder.lock():
        info = folder.prepare(recipe="a" * 64, recipe_name="quickstart")
        token = folder.token()
    with folder.lock():
        again = RunFolder(folder.path).prepare(recipe="a" * 64, recipe_name="quickstart")
    assert (again.run_id, again.created_s) == (info.run_id, info.created_s)
    assert folder.token() == token and len(token) >= 32
    assert stat.S_IMODE(folder.token_file.stat().st_mode) == 0o600


def test_another_recipe_is_refused_with_the_mend(tmp_path: Path) -> None:
    RunFolder(tmp_path).prepare(recipe="a" * 64, recipe_name="quickstart")
    with pytest.raises(RunFolderError, match=r"another recipe .*--out"):
        RunFolder(tmp_path).prepare(recipe="b" * 64, recipe_name="other")


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RunFolderError, match=r"thesis\.txt"):
        RunFolder(tmp_path).prepare(recipe="a" * 64, recipe_name="quickstart")
    with pytest.raises(RunFolderError, match="holds no run"):
        RunFolder(tmp_path).info()


def test_a_folder_in_use_names_its_owner(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    program = (
        "import sys, pathlib\nfrom tidemill.run.folder import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).lock():\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdin is not None and owner.stdout is not None
    try:
        assert owner.stdout.readline() == b"held\n"
        with pytest.raises(RunFolderError, match=f"in use by process {owner.pid}"), folder.lock():
            pass
        assert folder.owner() == owner.pid
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        with folder.lock():
            assert folder.owner() == os.getpid()
        assert folder.owner() is None
    finally:
        owner.kill()
        owner.stdin.close()
        owner.stdout.close()
        owner.wait()


def test_ports_differ_and_step_around_what_is_taken(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = folder.choose_ports(["coordinator-0", "engine-0"])
    assert len(set(first.values())) == 2
    assert all(FIRST_PORT <= port < FIRST_PORT + NUM_PORTS for port in first.values())
    with socket.socket() as server:
        server.bind(("127.0.0.1", first["coordinator-0"]))
        server.listen()
        assert not is_free(first["coordinator-0"])
        again = folder.choose_ports(["coordinator-0", "engine-0"])
        assert again["coordinator-0"] != first["coordinator-0"]


def test_services_and_halts_are_told_through_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.prepare(recipe="a" * 64, recipe_name="quickstart")
    assert folder.service("engine-0") is None
    info = ServiceInfo(who="engine-0", pid=1, start_ticks=2, started_s=3.0, port=20_001, starts=1)
    folder.announce(info)
    found = folder.service("engine-0")
    assert found is not None and found.port == 20_001
    assert [service.who for service in folder.all_services()] == ["engine-0"]
    folder.forget("engine-0")
    assert folder.all_services() == []
    assert folder.halt_cause() == ""
    folder.write_halt("the loss is NaN")
    folder.write_halt("and so on")
    assert folder.halt_cause() == "the loss is NaN"
    folder.clear_halt()
    assert folder.halt_cause() == ""
