"""Control groups: what counts as delegated, in either version, and what is written there."""

from pathlib import Path

import pytest

from tidemill.core.seams import SandboxLimits
from tidemill.sandboxes import cgroups

LIMITS = SandboxLimits(memory_bytes=1 << 26, max_processes=10, num_cpus=0.5)


def proc(tmp_path: Path, groups: str, mounts: str) -> Path:
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts)
    return folder


def unified(folder: Path, controllers: str, enabled: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.controllers").write_text(controllers)
    (folder / "cgroup.subtree_control").write_text(enabled)
    (folder / "cgroup.procs").write_text("")
    return folder


def test_version_1_nests_under_our_own_groups(tmp_path: Path) -> None:
    for name in ("memory/ours", "cpu,cpuacct/box", "pids"):
        (tmp_path / name).mkdir(parents=True)
    groups = "4:memory:/ours\n3:cpu,cpuacct:/docker/1/box\n2:pids:/elsewhere\n0::/\n"
    mounts = "".join(
        f"{number} 1 0:1 {root} {tmp_path}/{folder} rw - cgroup cgroup rw,{options}\n"
        for number, (root, folder, options) in enumerate(
            [("/", "memory", "memory"), ("/docker/1", "cpu,cpuacct", "cpu,cpuacct"), ("/docker/2", "pids", "pids")]
        )
    )
    found = cgroups.detect(proc(tmp_path, groups, mounts))
    assert found.version == 1
    assert found.parents["memory"] == tmp_path / "memory/ours"
    assert found.parents["cpu"] == found.parents["cpuacct"] == tmp_path / "cpu,cpuacct/box"
    assert found.parents["pids"] == tmp_path / "pids"  # a container that does not see its own path
    assert found.holds("memory") and not found.holds("io")


def test_version_2_goes_up_to_where_controllers_are_handed_down(tmp_path: Path) -> None:
    mount = unified(tmp_path / "fs", "cpu memory pids", "cpu memory pids")
    unified(mount / "app", "memory pids", "memory pids")
    unified(mount / "app" / "scope", "memory pids", "")
    (mount / "app" / "scope" / "cgroup.subtree_control").unlink()
    (mount / "app" / "scope" / "cgroup.subtree_control").mkdir()  # cannot be written: processes are inside
    found = cgroups.detect(proc(tmp_path, "0::/app/scope\n", f"1 1 0:1 / {mount} rw - cgroup2 cgroup2 rw\n"))
    assert (found.version, dict(found.parents)) == (2, {"memory": mount / "app", "pids": mount / "app"})
    group = found.create("tidemill-x", LIMITS)
    folder = mount / "app" / "tidemill-x"
    assert (folder / "memory.max").read_text() == str(1 << 26)
    assert (folder / "pids.max").read_text() == str(10 + cgroups.OWN_PROCESSES)
    assert not (folder / "cpu.max").exists()
    assert group.join_files() == [str(folder / "cgroup.procs")]
    (folder / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (folder / "memory.events").write_text("oom 4\noom_kill 3\n")
    assert (group.cpu_s(), group.oom_kills()) == (2.5, 3)


def test_nothing_delegated_is_no_failure(tmp_path: Path) -> None:
    assert cgroups.detect(tmp_path / "nowhere").version == 0
    assert cgroups.detect(proc(tmp_path, "0::/\n", "1 1 0:1 / / rw - ext4 /dev/root rw\n")).version == 0
    group = cgroups.NONE.create("name", LIMITS)
    assert (group.join_files(), group.cpu_s(), group.oom_kills(), group.remove()) == ([], None, 0, 0)


def test_a_group_that_cannot_be_set_up_is_not_left(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    groups = cgroups.Cgroups(version=1, parents={"memory": tmp_path, "pids": tmp_path / "file"})
    with pytest.raises(OSError):
        groups.create("name", LIMITS)
    assert not (tmp_path / "name").exists()
