"""Old payloads go; nothing that a living follower, a pin or a race may need goes with them."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tidemill.core.errors import StoreError
from tidemill.core.records import Array
from tidemill.core.seams import Weights
from tidemill.deltas.api import follow
from tidemill.deltas.retention import collect, collected, stand
from tidemill.deltas.store import FolderStore


def weights(version: int) -> Weights:
    words = np.arange(5000) + (np.arange(5000) % 50 < version)
    return Weights(config={}, tokenizer={"t": b"x"}, tensors={"w": Array.of(words, "uint16")})


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """Keyframes 0, 4, 8; everything two hours old."""
    store = FolderStore(tmp_path / "store", keyframe_every=4)
    for version in range(10):
        store.publish(weights(version), version=version, batch=f"{version}", step=version, run_id="r")
    age(store)
    return FolderStore(tmp_path / "store", keyframe_every=4)


def age(store: FolderStore | Path) -> None:
    old = time.time() - 7200
    for path in (store if isinstance(store, Path) else store.folder).rglob("*"):
        os.utime(path, (old, old))


def readable(store: FolderStore) -> list[int]:
    found = []
    for version in store.versions():
        try:
            loaded = FolderStore(store.folder).load(version)
        except StoreError:
            continue
        assert loaded.tensors["w"].data == weights(version).tensors["w"].data
        found.append(version)
    return found


def test_the_newest_versions_and_their_chain_are_kept(store: FolderStore) -> None:
    assert collect(store, keep=3, dry_run=True).num_blobs == 4
    assert readable(store) == list(range(10))
    done = collect(store, keep=3)  # versions 7, 8 and 9: version 7 rests on 4, 5 and 6
    assert (done.horizon, done.num_blobs) == (4, 4)
    assert readable(store) == [4, 5, 6, 7, 8, 9]
    assert collect(store, keep=3).num_blobs == 0
    assert store.publish(weights(10), version=10, batch="10", step=10, run_id="r").kind == "delta"
    assert store.versions() == list(range(11))


def test_a_living_follower_and_a_pin_hold_what_they_need(store: FolderStore) -> None:
    stand(store, "engine-1", 5)
    collect(store, keep=1, pins=frozenset({1}))
    assert readable(store) == [0, 1, 4, 5, 6, 7, 8, 9]
    age(store)  # the follower has been silent for two hours
    collect(store, keep=1)
    assert readable(store) == [8, 9]


def test_one_who_follows_is_protected_as_long_as_it_lives(store: FolderStore) -> None:
    def stood() -> list[str]:
        return [path.name for path in (store.folder / "followers").glob("*")]

    followed = follow(store.folder)
    assert next(followed).manifest.version == 9
    for version in range(10, 14):
        store.publish(weights(version), version=version, batch="b", step=version, run_id="r")
    age(store.folder / "blobs")  # all but the follower's word
    collect(store, keep=1)
    assert readable(store) == [8, 9, 10, 11, 12, 13]
    assert next(followed).manifest.version == 13
    assert len(stood()) == 1
    followed.close()
    assert stood() == []
    collect(store, keep=1)
    assert readable(store) == [12, 13]


def test_what_the_dead_said_is_taken_away(store: FolderStore) -> None:
    stand(store, "dead", 0)
    age(store)
    collect(store, keep=1, dry_run=True)
    assert (store.folder / "followers" / "dead").exists()
    collect(store, keep=1)
    assert not (store.folder / "followers" / "dead").exists()


def test_what_was_given_up_is_known_and_stays_given_up(store: FolderStore) -> None:
    collect(store, keep=1, dry_run=True)
    assert collected(store) == frozenset()
    assert collect(store, keep=1).horizon == 8
    assert collected(store) == frozenset(range(8))
    assert collect(store, keep=5, pins=frozenset({0})).horizon == 8
    assert collected(store) == frozenset(range(8))
    (store.folder / "collected").write_text("?")
    with pytest.raises(StoreError, match=r"collected versions in .* damaged"):
        collect(store, keep=1)


def test_what_is_young_stays(store: FolderStore) -> None:
    orphan = store.blobs.put(b"of a publication that is under way")
    (store.folder / "blobs" / orphan[:2] / f".{orphan[2:]}-half").write_bytes(b"half")
    collect(store, keep=1)
    assert store.blobs.has(orphan)
    age(store)
    collect(store, keep=1)
    assert not store.blobs.has(orphan)


def test_what_is_put_while_it_is_being_deleted_is_there(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector has seen an old blob; before it deletes it, a publisher puts the same bytes again."""
    orphan = store.blobs.put(b"wanted again")
    age(store)
    publishers = list[threading.Thread]()
    unlink = os.unlink

    def unlink_late(path: Path) -> None:
        if path.name == orphan[2:]:
            publishers.append(threading.Thread(target=store.blobs.put, args=(b"wanted again",)))
            publishers[0].start()
            publishers[0].join(timeout=0.3)  # it has to wait until the collector is done
        unlink(path)

    monkeypatch.setattr(os, "unlink", unlink_late)
    collect(store, keep=1)
    publishers[0].join(timeout=60)
    assert store.blobs.get(orphan) == b"wanted again"


def test_a_damaged_manifest_deletes_nothing(store: FolderStore) -> None:
    (store.folder / "versions" / "00000006.json").write_text("{")
    before = sorted(store.folder.rglob("*"))
    with pytest.raises(StoreError, match="manifest of version 6"):
        collect(store, keep=1)
    assert sorted(store.folder.rglob("*")) == before
    with pytest.raises(StoreError, match="keep is 0"):
        collect(store, keep=0)
    with pytest.raises(StoreError, match="cannot name a follower"):
        stand(store, "../x", 1)
