"""The cache under sandboxes: whole or not there, whoever builds, whatever breaks."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.core.errors import SandboxError, SandboxUnavailable, UsageError
from tidemill.core.records import Layer, Tree, TreeFile
from tidemill.sandboxes import layers, trees
from tidemill.sandboxes.cache import NUM_SLOTS, Cache, Slots, first_slot_uid
from tidemill.sandboxes.owners import Owner, start_ticks


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that others can enter, which pytest's own is not."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="tidemill-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def fill(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "file").write_text("content")


def test_built_once_and_again_when_damaged(root: Path) -> None:
    built = []

    def make(folder: Path) -> None:
        built.append(folder)
        fill(folder)

    for expected in (1, 1):  # another process's object finds what the first has built
        cache = Cache(root)
        cache.open()
        for _ in range(2):
            assert (cache.build("things", "a", make) / "inner" / "file").read_text() == "content"
            assert cache.is_sound("things", "a") is not None
        assert len(built) == expected
    for damage in ("cut", "missing", "no list"):
        file = root / "things" / "a" / "inner" / "file"
        if damage == "cut":
            file.write_text("")
        elif damage == "missing":
            file.unlink()
        else:
            (root / "things" / "a" / ".files").unlink()
        built.clear()
        assert (Cache(root).build("things", "a", make) / "inner" / "file").read_text() == "content"
        assert len(built) == 1, damage


def test_half_built_is_never_seen_and_is_cleared_away(root: Path) -> None:
    cache = Cache(root)

    def broken(folder: Path) -> None:
        fill(folder)
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        cache.build("things", "a", broken)
    assert [path.name for path in (root / "things").iterdir()] == [".a.lock"]
    leftover = root / "things" / ".a.part-killed"  # of a builder that was killed
    fill_folder = leftover
    fill_folder.mkdir()
    cache.build("things", "a", fill)
    assert not leftover.exists()


def test_a_full_disk_is_told_as_one(root: Path) -> None:
    def full(folder: Path) -> None:
        fill(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SandboxUnavailable, match="TIDEMILL_CACHE"):
        Cache(root).build("things", "a", full)
    assert [path.name for path in (root / "things").iterdir()] == [".a.lock"]

    def denied(folder: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    with pytest.raises(SandboxError, match="Permission"):
        Cache(root).build("things", "a", denied)


def test_builders_wait_for_each_other(root: Path) -> None:
    inside = threading.Event()
    go_on = threading.Event()
    built = []

    def slow(folder: Path) -> None:
        built.append("slow")
        inside.set()
        assert go_on.wait(20)
        fill(folder)

    def other(folder: Path) -> None:
        built.append("other")
        fill(folder)

    first = threading.Thread(target=lambda: Cache(root).build("things", "a", slow))
    second = threading.Thread(target=lambda: Cache(root).build("things", "a", other))
    first.start()
    assert inside.wait(20)
    second.start()
    second.join(0.1)
    assert second.is_alive()
    go_on.set()
    first.join(20)
    second.join(20)
    assert built == ["slow"]


def test_the_root_must_be_ours_and_open_to_pass_through(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.chmod(0o777)
    with pytest.raises(SandboxUnavailable, match="yours alone"):
        Cache(root).open()
    root.chmod(0o755)
    Cache(root / "new" / "deep").open()
    link = root / "link"
    link.symlink_to(root / "new")
    with pytest.raises(SandboxUnavailable, match="yours alone"):
        Cache(link).open()
    file = root / "file"
    file.touch()
    with pytest.raises(SandboxUnavailable, match="TIDEMILL_CACHE"):
        Cache(file / "below").open()
    if os.geteuid() == 0:
        closed = root / "closed"
        closed.mkdir(mode=0o700)
        with pytest.raises(SandboxUnavailable, match="entered"):
            Cache(closed / "below").open()
    monkeypatch.setenv("TIDEMILL_CACHE", str(root / "named"))
    assert Cache().root == root / "named"
    monkeypatch.delenv("TIDEMILL_CACHE")
    assert Cache().root == Path(f"/var/tmp/tidemill-{os.geteuid()}")


def test_what_no_one_uses_is_pruned_and_what_was_cleared_is_built_again(root: Path) -> None:
    cache = Cache(root)
    for name in ("old", "used", "new"):
        cache.build("things", name, fill)
    for name in ("old", "used"):
        os.utime(root / "things" / name, (1, 1))
    assert cache.is_sound("things", "used") is not None  # an opening dates it
    assert cache.prune("things", 3600.0) == 1
    assert sorted(path.name for path in (root / "things").iterdir() if path.is_dir()) == ["new", "used"]
    assert cache.is_sound("things", "old") is None
    assert (cache.build("things", "old", fill) / "inner" / "file").exists()


def test_sandbox_ids_lie_within_what_a_container_has() -> None:
    assert first_slot_uid("         0          0 4294967295\n") == 1_900_000_000
    inside = first_slot_uid("0 1000 1\n1 100000 65536\n")
    assert inside > 1000 and inside + NUM_SLOTS <= 65537
    assert first_slot_uid("0 1000 1\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user has one id only")
def test_user_ids_are_never_shared(root: Path) -> None:
    first, second = Slots(root), Slots(root)
    ids = [first.take(), second.take(), first.take()]
    assert len(set(ids)) == 3
    assert all(uid is not None and uid > 1_000_000 for uid in ids)
    first.give_back(ids[2])
    assert first.take() == ids[2]
    first.close()
    assert second.take() in (ids[0], ids[2])
    second.close()


def test_trees_are_unpacked_as_they_are(root: Path) -> None:
    files = (
        TreeFile(path="a/b/c.py", data=b"X = 1\n"),
        TreeFile(path="bad.py", data=b"def\n"),
        TreeFile(path="tool", data=b"\0\xff", executable=True),
    )
    folder = root / "tree"
    folder.mkdir()
    uid = 1_900_000_001 if os.geteuid() == 0 else None
    trees.unpack(Tree(files=files), folder, uid)
    assert (folder / "a/b/c.py").read_bytes() == b"X = 1\n"
    assert (folder / "tool").stat().st_mode & 0o777 == 0o755
    if uid is not None:
        assert {path.stat().st_uid for path in (folder, *folder.rglob("*"))} == {uid}
    with pytest.raises(UsageError, match="relative"):
        trees.unpack(Tree(files=(TreeFile(path="../x", data=b""),)), root / "tree", None)
    bytecode = root / "bytecode"
    bytecode.mkdir()
    trees.compile_tree(Tree(files=files), bytecode, "/workspace")
    assert [path.name for path in bytecode.rglob("*.pyc")] == [f"c.{sys.implementation.cache_tag}.pyc"]


def test_a_layer_says_what_this_machine_cannot_give(root: Path) -> None:
    with pytest.raises(SandboxUnavailable, match=r"Python 2\.7\.18"):
        layers.build_layer(Layer(python="2.7.18", packages=()), root / "layer")
    with pytest.raises(UsageError, match="not installed"):
        layers.installed_layer(["no-such-distribution-at-all"])
    layer = layers.installed_layer(["pytest"])
    assert {package.partition("==")[0] for package in layer.packages} >= {"pytest", "pluggy", "iniconfig"}
    assert list(layer.packages) == sorted(layer.packages)


def test_records_of_dead_owners_are_reaped(root: Path) -> None:
    owner = Owner(root, "run-a")
    living = owner.reserve()
    killed = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
    start = start_ticks(killed.pid)
    assert start is not None
    dead = root / "run-a" / "999999999-5"
    dead.mkdir()
    owner.note(dead / "1.json", {"pid": killed.pid, "start": start, "cgroups": []})
    recycled = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)  # a pid that was given again
    owner.note(dead / "2.json", {"pid": recycled.pid, "start": 1, "cgroups": []})
    (dead / "3.json").touch()  # the owner died before it had written
    same_pid = root / "run-a" / f"{os.getpid()}-1"  # an earlier process with our pid
    same_pid.mkdir()
    other_label = root / "run-b" / "999999999-5"
    other_label.mkdir(parents=True)
    (other_label / "1.json").touch()
    assert owner.reap() >= 3
    assert killed.wait(20) == -9
    assert recycled.poll() is None
    assert living.exists() and (other_label / "1.json").exists()
    assert not dead.exists() and not same_pid.exists()
    assert owner.reap() == 0
    recycled.kill()
    recycled.wait()
