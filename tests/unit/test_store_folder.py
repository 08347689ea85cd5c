"""What only a folder can suffer: damage, full disks, kills, leftovers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tidemill.core.errors import StoreError
from tidemill.core.records import Array
from tidemill.core.seams import Weights
from tidemill.deltas.store import FolderStore


def some_weights(seed: int, num: int = 3) -> Weights:
    rng = np.random.default_rng(seed)
    tensors = {"w": Array.of(rng.integers(0, 1 << 16, (num, 3)), "uint16")}
    return Weights(config={"hidden_size": 3}, tokenizer={"tokenizer.json": b"{}"}, tensors=tensors)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    store = FolderStore(tmp_path / "store")
    store.publish(some_weights(0), version=0, batch=None, step=0, run_id="run")
    return store


def blob_path(store: FolderStore, version: int, name: str) -> Path:
    blob = store.manifest(version).files[name]
    return store.folder / "blobs" / blob[:2] / blob[2:]


def files_under(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_equal_files_of_two_versions_lie_there_once(store: FolderStore) -> None:
    before = files_under(store.folder / "blobs")
    store.publish(some_weights(1), version=1, batch="b", step=1, run_id="run")
    assert len(files_under(store.folder / "blobs") - before) == 1  # the weights alone
    assert store.manifest(0).files["tokenizer.json"] == store.manifest(1).files["tokenizer.json"]


@pytest.mark.parametrize("keep", [0, 10, -1], ids=["empty", "cut off", "one byte short"])
def test_a_cut_off_payload_is_refused(store: FolderStore, keep: int) -> None:
    path = blob_path(store, 0, "model.safetensors")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StoreError, match=r"version 0 in .* damaged"):
        store.load(0)


def test_every_flipped_byte_of_a_payload_is_refused(store: FolderStore) -> None:
    path = blob_path(store, 0, "model.safetensors")
    whole = path.read_bytes()
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        with pytest.raises(StoreError):
            store.load(0)
    path.write_bytes(whole)
    assert store.load(0).tensors["w"].data == some_weights(0).tensors["w"].data


def test_a_missing_payload_is_refused(store: FolderStore) -> None:
    blob_path(store, 0, "tokenizer.json").unlink()
    with pytest.raises(StoreError, match=r"version 0 in .*: no blob"):
        store.load(0)
    with pytest.raises(StoreError, match="no blob"):
        store.export(0, store.folder.parent / "out")
    assert not (store.folder.parent / "out").exists()


def test_tensor_hashes_are_checked_apart_from_the_blob(store: FolderStore) -> None:
    """A manifest whose file and tensors do not belong together is refused, though every blob is whole."""
    store.publish(some_weights(1), version=1, batch="b", step=1, run_id="run")
    path = store.folder / "versions" / "00000001.json"
    one, two = store.manifest(0), store.manifest(1)
    path.write_text(path.read_text().replace(two.files["model.safetensors"], one.files["model.safetensors"]))
    with pytest.raises(StoreError, match="tensor w is damaged"):
        store.load(1)


@pytest.mark.parametrize("text", ["", "{", '{"version": 0}', "[]", "\udcff"], ids=str)
def test_a_damaged_manifest_is_refused(store: FolderStore, text: str) -> None:
    (store.folder / "versions" / "00000000.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    for call in (store.manifest, store.load):
        with pytest.raises(StoreError, match=r"manifest of version 0 .* damaged"):
            call(0)


def test_a_manifest_under_another_versions_name_is_refused(store: FolderStore) -> None:
    versions = store.folder / "versions"
    (versions / "00000001.json").write_bytes((versions / "00000000.json").read_bytes())
    with pytest.raises(StoreError, match="says version 0"):
        store.load(1)


def test_head_comes_from_the_manifests_not_from_the_hint(store: FolderStore) -> None:
    assert (store.folder / "HEAD").read_text() == "0\n"
    (store.folder / "HEAD").write_text("41\n")
    assert FolderStore(store.folder).head() == 0
    (store.folder / "HEAD").unlink()
    assert store.head() == 0
    (store.folder / "versions" / ".new-abandoned").write_bytes(b"half")
    assert store.head() == 0


FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_store_folder import some_weights
from tidemill.deltas.store import FolderStore
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = FolderStore(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    store.publish(some_weights(1, num=3), version=1, batch="b", step=1, run_id="run")
except OSError as error:
    print("refused", error.errno)
"""


@pytest.mark.parametrize("limit_bytes", [16, 300], ids=["in the payload", "in the manifest"])
def test_a_full_disk_leaves_nothing_half_written(store: FolderStore, limit_bytes: int) -> None:
    """The limit of a file's size stands in for a full disk: the write fails in its middle, with an `OSError`."""
    before = files_under(store.folder)
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(store.folder), here, str(limit_bytes)],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "refused" in done.stdout, done.stderr
    assert store.head() == 0
    left = files_under(store.folder) - before
    assert all(not Path(name).name.startswith(".") for name in left), left
    for name in left:  # whole blobs may have come before the failure: they are found again by the retry
        assert name.startswith("blobs/")
    store.publish(some_weights(1, num=3), version=1, batch="b", step=1, run_id="run")
    assert store.load(1).tensors["w"].data == some_weights(1).tensors["w"].data


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_store_folder import some_weights
from tidemill.deltas import store as module
real = os.link
def link(source, target):
    if sys.argv[3] == "after":
        real(source, target)
    os._exit(9)
os.link = link
module.FolderStore(Path(sys.argv[1])).publish(some_weights(1), version=1, batch="b", step=1, run_id="run")
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_the_commit_leaves_all_or_nothing(store: FolderStore, moment: str) -> None:
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", KILLED, str(store.folder), here, moment], check=False, timeout=60)
    assert done.returncode == 9
    assert store.head() == (1 if moment == "after" else 0)
    again = store.publish(some_weights(1), version=1, batch="b", step=1, run_id="run")
    assert again.version == store.head() == 1
    assert store.load(1).tensors["w"].data == some_weights(1).tensors["w"].data
    assert os.listdir(store.folder / "versions").count("00000001.json") == 1
