"""One suite over both stores: what the learner, the engines and the evaluator rely on."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.races import race
from tidemill.core.errors import StoreError, VersionTaken
from tidemill.core.records import Array, encode
from tidemill.core.seams import Store, Weights
from tidemill.deltas.store import FolderStore, MemoryStore


def some_weights(seed: int, *, rows: int = 5, config: dict[str, int] | None = None) -> Weights:
    rng = np.random.default_rng(seed)
    return Weights(
        config=config or {"hidden_size": 3, "architectures": ["Tiny"]},
        tokenizer={"tokenizer.json": b'{"a": 1}', "tokenizer_config.json": b"{}"},
        tensors={
            "model.norm.weight": Array.of(rng.integers(0, 1 << 16, 3), "uint16"),
            "model.embed.weight": Array.of(rng.integers(0, 1 << 16, (rows, 3)), "uint16"),
        },
    )


def publish(store: Store, version: int, seed: int, batch: str | None = "") -> object:
    batch = f"batch-{version}" if batch == "" and version else batch or None
    return store.publish(some_weights(seed), version=version, batch=batch, step=10 + version, run_id="run")


@pytest.fixture(params=["folder", "memory"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Store]:
    """Opens the same store again and again, as several services do."""
    memory = MemoryStore()
    return (lambda: FolderStore(tmp_path / "store")) if request.param == "folder" else (lambda: memory)


def test_an_empty_store_has_no_head(open_store: Callable[[], Store]) -> None:
    store = open_store()
    assert store.head() is None
    with pytest.raises(StoreError, match="no version 0"):
        store.manifest(0)
    with pytest.raises(StoreError, match="no version 0"):
        store.load(0)


def test_what_is_published_is_loaded_bit_for_bit(open_store: Callable[[], Store]) -> None:
    weights = some_weights(0)
    snapshot = open_store().publish(weights, version=0, batch=None, step=7, run_id="run")
    store = open_store()
    assert store.head() == 0
    assert encode(store.manifest(0)) == encode(snapshot)
    assert (snapshot.kind, snapshot.parent, snapshot.batch, snapshot.step) == ("full", None, None, 7)
    loaded = store.load(0)
    assert loaded.config == weights.config
    assert loaded.tokenizer == weights.tokenizer
    assert {name: (a.data, a.dtype, a.shape) for name, a in loaded.tensors.items()} == {
        name: (a.data, a.dtype, a.shape) for name, a in weights.tensors.items()
    }


def test_nan_payloads_and_negative_zero_survive(open_store: Callable[[], Store]) -> None:
    bits = Array.of([0x8000, 0x7FC1, 0xFF80, 0x7F81, 0xFFFF, 0x0001], "uint16")
    weights = Weights(config={}, tokenizer={}, tensors={"w": bits, "empty": Array.of(np.zeros((0, 4)), "uint16")})
    store = open_store()
    store.publish(weights, version=0, batch=None, step=0, run_id="run")
    loaded = store.load(0).tensors
    assert loaded["w"].data == bits.data
    assert loaded["empty"].shape == (0, 4)


def test_the_same_publication_again_returns_the_one_that_stands(open_store: Callable[[], Store]) -> None:
    first = open_store().publish(some_weights(0), version=0, batch=None, step=7, run_id="run")
    again = open_store().publish(some_weights(0), version=0, batch=None, step=8, run_id="run")
    assert encode(again) == encode(first)


@pytest.mark.parametrize(("seed", "batch"), [(9, "batch-1"), (1, "batch-2")], ids=["weights", "batch"])
def test_another_content_under_a_version_is_refused(open_store: Callable[[], Store], seed: int, batch: str) -> None:
    store = open_store()
    publish(store, 0, 0)
    standing = store.publish(some_weights(1), version=1, batch="batch-1", step=1, run_id="run")
    with pytest.raises(VersionTaken, match="version 1 stands already"):
        store.publish(some_weights(seed), version=1, batch=batch, step=1, run_id="run")
    assert encode(store.manifest(1)) == encode(standing)
    assert store.load(1).tensors["model.norm.weight"].data == some_weights(1).tensors["model.norm.weight"].data


def test_a_gap_is_refused(open_store: Callable[[], Store]) -> None:
    store = open_store()
    with pytest.raises(StoreError, match="version 0 does not exist"):
        publish(store, 1, 1)
    publish(store, 0, 0)
    with pytest.raises(StoreError, match="version 1 does not exist"):
        publish(store, 2, 2)
    assert store.head() == 0


def test_a_version_of_another_model_is_refused(open_store: Callable[[], Store]) -> None:
    store = open_store()
    publish(store, 0, 0)
    other = some_weights(1, config={"hidden_size": 4})
    with pytest.raises(StoreError, match="of another model"):
        store.publish(other, version=1, batch="b", step=1, run_id="run")
    assert store.head() == 0


def test_a_version_of_another_run_is_refused(open_store: Callable[[], Store]) -> None:
    def publish_as(run_id: str, version: int) -> object:
        return open_store().publish(some_weights(version), version=version, batch="b", step=version, run_id=run_id)

    publish_as("one", 0)
    with pytest.raises(VersionTaken, match="version 0 is of run one, not of two"):
        publish_as("two", 1)
    assert open_store().head() == 0
    publish_as("one", 1)  # a run that was resumed
    publish_as("", 2)  # who names no run is taken at their word
    publish_as("two", 3)


def test_float_tensors_and_reserved_names_are_refused(open_store: Callable[[], Store]) -> None:
    store = open_store()
    floats = Weights(config={}, tokenizer={}, tensors={"w": Array.of([1.0], "float32")})
    with pytest.raises(StoreError, match="w is float32"):
        store.publish(floats, version=0, batch=None, step=0, run_id="run")
    for name in ("config.json", "../escape", "a/b", ".."):
        bad = Weights(config={}, tokenizer={name: b""}, tensors={"w": Array.of([1], "uint16")})
        with pytest.raises(StoreError, match="tokenizer file"):
            store.publish(bad, version=0, batch=None, step=0, run_id="run")
    assert store.head() is None


def test_ten_versions_in_a_row(open_store: Callable[[], Store]) -> None:
    store = open_store()
    for version in range(10):
        publish(store, version, version)
    assert open_store().head() == 9
    for version in range(10):
        assert store.manifest(version).batch == (f"batch-{version}" if version else None)
        assert store.load(version).tensors["model.embed.weight"].data == (
            some_weights(version).tensors["model.embed.weight"].data
        )


def test_export_is_a_folder_that_safetensors_reads(open_store: Callable[[], Store], tmp_path: Path) -> None:
    store = open_store()
    publish(store, 0, 0)
    folder = tmp_path / "export" / "v0"
    store.export(0, folder)
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.embed.weight"].dtype == torch.bfloat16
    bits = tensors["model.embed.weight"].view(torch.uint16).numpy()
    assert bits.tobytes() == some_weights(0).tensors["model.embed.weight"].data
    with pytest.raises(StoreError, match="not empty"):
        store.export(0, folder)


def test_threads_racing_for_a_version_leave_one_winner(open_store: Callable[[], Store]) -> None:
    publish(open_store(), 0, 0)
    stores = [open_store() for _ in range(6)]
    assert race(lambda seed: publish(stores[seed], 1, seed), len(stores)) == ["taken"] * 5 + ["won"]


RACER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[3], str(Path(sys.argv[3]).parent)]
from test_store_contract import some_weights
from tidemill.core.errors import VersionTaken
from tidemill.deltas.store import FolderStore
store = FolderStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
try:
    store.publish(some_weights(int(sys.argv[2])), version=1, batch="b", step=1, run_id="run")
    print("won")
except VersionTaken:
    print("taken")
"""


def test_two_processes_racing_for_a_version_leave_one_winner(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    publish(store, 0, 0)
    here = str(Path(__file__).parent)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path / "store"), str(seed), here],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for seed in (1, 2)
    ]  # fmt: skip
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outcomes = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    assert sorted(outcomes) == ["taken", "won"]
    winner = 1 + outcomes.index("won")
    assert store.load(1).tensors["model.embed.weight"].data == some_weights(winner).tensors["model.embed.weight"].data
    assert not [name for name in os.listdir(store.folder / "versions") if not name.endswith(".json")]
