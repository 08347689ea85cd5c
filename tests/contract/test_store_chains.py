"""Versions as keyframes and deltas: what a follower may rely on, whatever lies damaged on the way."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.races import race
from tidemill.core.errors import StoreError, VersionTaken
from tidemill.core.records import Array
from tidemill.core.seams import Weights
from tidemill.deltas.layout import DELTA_FILE, WEIGHTS_FILE
from tidemill.deltas.store import FolderStore, MemoryStore, SnapshotStore


def policy(version: int) -> Weights:
    """Small steps: about 1 % of the weights move from each version to the next."""
    rng = np.random.default_rng(0)
    words = ((rng.standard_normal((40, 60)) * 0.1).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for number in range(1, version + 1):
        step = np.random.default_rng(number)
        words = np.where(step.random(words.shape) < 0.01, words + 1, words).astype(np.uint16)
    return Weights(
        config={"hidden_size": 60},
        tokenizer={"tokenizer.json": b"{}"},
        tensors={"w": Array.of(words, "uint16"), "still": Array.of(np.ones(5), "uint16")},
    )


def publish(store: SnapshotStore, version: int) -> str:
    return store.publish(policy(version), version=version, batch=f"b{version}", step=version, run_id="run").kind


def same(loaded: Weights, version: int) -> bool:
    return {n: a.data for n, a in loaded.tensors.items()} == {n: a.data for n, a in policy(version).tensors.items()}


Open = Callable[..., SnapshotStore]


@pytest.fixture(params=["folder", "memory"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "folder":
        return lambda **options: FolderStore(tmp_path / "store", **options)
    memory: list[MemoryStore] = []
    return lambda **options: memory[0] if memory else memory.append(MemoryStore(**options)) or memory[0]  # type: ignore[func-returns-value]


def blob_of(store: FolderStore, version: int) -> Path:
    files = store.manifest(version).files
    name = files[DELTA_FILE if DELTA_FILE in files else WEIGHTS_FILE]
    return store.folder / "blobs" / name[:2] / name[2:]


def test_versions_are_deltas_between_keyframes(open_store: Open) -> None:
    store = open_store(keyframe_every=4)
    assert [publish(store, version) for version in range(9)] == ["full", *["delta"] * 3] * 2 + ["full"]
    for version in (8, 3, 7, 0, 5):
        assert same(open_store().load(version), version)
    manifest = store.manifest(3)
    assert (manifest.kind, manifest.parent) == ("delta", 2)
    full = store.manifest(0).num_bytes
    assert manifest.num_bytes < full / 10


def test_a_chain_that_costs_more_than_a_keyframe_ends(open_store: Open) -> None:
    store = open_store()
    kinds = []
    for version in range(6):
        rng = np.random.default_rng(version)
        tensors = {"w": Array.of(np.where(rng.random(4000) < 0.4, rng.integers(0, 1 << 16, 4000), 7), "uint16")}
        weights = Weights(config={}, tokenizer={}, tensors=tensors)
        kinds.append(store.publish(weights, version=version, batch="b", step=version, run_id="r").kind)
        assert store.load(version).tensors["w"].data == tensors["w"].data
    assert kinds.count("full") >= 2


def test_a_redo_of_a_delta_is_the_one_that_stands_and_another_one_is_refused(open_store: Open) -> None:
    store = open_store()
    for version in range(3):
        publish(store, version)
    standing = store.manifest(2)
    assert publish(open_store(), 2) == "delta"
    assert store.manifest(2).files == standing.files
    with pytest.raises(VersionTaken, match="other weights"):
        store.publish(policy(1), version=2, batch="b2", step=2, run_id="run")
    with pytest.raises(VersionTaken, match="another batch"):
        store.publish(policy(2), version=2, batch="b9", step=2, run_id="run")


def test_a_late_joiner_and_a_follower_export_the_same(open_store: Open, tmp_path: Path) -> None:
    store = open_store()
    for version in range(4):
        publish(store, version)
    open_store().export(3, tmp_path / "late")
    for version in range(4):
        store.load(version)
    store.export(3, tmp_path / "followed")
    names = sorted(path.name for path in (tmp_path / "late").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    for name in names:
        assert (tmp_path / "late" / name).read_bytes() == (tmp_path / "followed" / name).read_bytes()


@pytest.mark.parametrize("how", ["flip", "truncate", "drop", "other"])
def test_a_damaged_link_is_refused_and_the_next_publication_mends_the_chain(tmp_path: Path, how: str) -> None:
    store = FolderStore(tmp_path / "store")
    for version in range(4):
        publish(store, version)
    follower = FolderStore(tmp_path / "store")
    assert same(follower.load(2), 2)
    path = blob_of(store, 2)
    data = path.read_bytes()
    if how == "drop":
        path.unlink()
    else:
        broken = {"flip": data[:-30] + bytes([data[-30] ^ 1]) + data[-29:], "truncate": data[:-9]}
        path.write_bytes(broken.get(how, blob_of(store, 1).read_bytes()))
    fresh = FolderStore(tmp_path / "store")
    assert same(fresh.load(1), 1)
    for version in (2, 3):
        with pytest.raises(StoreError, match="version 2 in"):
            FolderStore(tmp_path / "store").load(version)
    # A follower that holds version 2 needs nothing of what is damaged.
    assert same(follower.load(3), 3)
    # A publisher that was started again cannot read version 3: it publishes a keyframe, and all is well.
    assert publish(FolderStore(tmp_path / "store"), 4) == "full"
    assert same(FolderStore(tmp_path / "store").load(4), 4)


def test_repeated_and_reordered_links_are_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    for version in range(4):
        publish(store, version)
    versions = tmp_path / "store" / "versions"
    original = {v: json.loads((versions / f"{v:08d}.json").read_text()) for v in range(4)}

    def rewrite(version: int, **changes: object) -> None:
        (versions / f"{version:08d}.json").write_text(json.dumps({**original[version], **changes}))

    def with_delta_of(other: int) -> dict[str, str]:
        return {**original[3]["files"], DELTA_FILE: original[other]["files"][DELTA_FILE]}

    for changes in (
        {"files": with_delta_of(2)},  # the delta before it once more
        {"parent": 1},  # one left out
        {"parent": 3},
        {"parent": 9},
        {"parent": None},
        {"files": {**original[3]["files"], DELTA_FILE: original[0]["files"][WEIGHTS_FILE]}},
    ):
        rewrite(3, **changes)
        with pytest.raises(StoreError):
            FolderStore(tmp_path / "store").load(3)
        with pytest.raises(StoreError):
            store.load(3)
    rewrite(3)
    assert same(FolderStore(tmp_path / "store").load(3), 3)
    # Two links change places.
    rewrite(2, files={**original[2]["files"], DELTA_FILE: original[3]["files"][DELTA_FILE]})
    rewrite(3, files={**original[3]["files"], DELTA_FILE: original[2]["files"][DELTA_FILE]})
    with pytest.raises(StoreError):
        FolderStore(tmp_path / "store").load(3)


def test_threads_that_race_with_deltas_leave_one_winner(open_store: Open) -> None:
    publish(open_store(), 0)
    publish(open_store(), 1)
    stores = [open_store() for _ in range(4)]
    weights = [policy(2 + seed) for seed in range(4)]
    outcomes = race(
        lambda seed: stores[seed].publish(weights[seed], version=2, batch="b", step=2, run_id="run"), len(stores)
    )
    assert outcomes == ["taken"] * 3 + ["won"]
    assert any(same(open_store().load(2), 2 + seed) for seed in range(4))
