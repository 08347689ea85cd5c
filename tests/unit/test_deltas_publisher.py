"""The trainer never waits; versions are skipped, not queued; the end is loud."""

import threading
import time

import numpy as np
import pytest

from tidemill.core.errors import StoreError, VersionTaken
from tidemill.core.records import Array, Snapshot
from tidemill.core.seams import Weights
from tidemill.deltas.api import publish
from tidemill.deltas.publisher import Publisher
from tidemill.deltas.store import MemoryStore

DEADLINE_S = 20.0


def weights(step: int) -> Weights:
    return Weights(config={}, tokenizer={}, tensors={"w": Array.of(np.arange(500) + (np.arange(500) < step), "uint16")})


def test_what_is_offered_meanwhile_is_skipped_and_the_newest_is_published() -> None:
    store, published = MemoryStore(), list[Snapshot]()
    entered, go = threading.Event(), threading.Event()

    def slow(snapshot: Snapshot) -> None:
        published.append(snapshot)
        entered.set()
        assert go.wait(DEADLINE_S)

    publisher = Publisher(store, on_published=slow)
    publisher.offer(weights(0), step=0)
    assert entered.wait(DEADLINE_S)
    start = time.monotonic()
    for step in range(1, 6):
        publisher.offer(weights(step), step=step)
    assert time.monotonic() - start < 1.0
    go.set()
    publisher.close()
    assert [(snapshot.version, snapshot.step) for snapshot in published] == [(0, 0), (1, 5)]
    assert (publisher.num_published, publisher.num_skipped) == (2, 4)
    assert store.load(1).tensors["w"].data == weights(5).tensors["w"].data


def test_a_fault_is_told_and_the_next_offer_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    store, faults, told = MemoryStore(), list[Exception](), threading.Event()
    put, full = store.blobs.put, [True]

    def failing(data: bytes) -> str:
        if full[0]:
            raise OSError(28, "No space left on device")
        return put(data)

    monkeypatch.setattr(store.blobs, "put", failing)

    def on_fault(error: Exception) -> None:
        faults.append(error)
        told.set()

    publisher = Publisher(store, on_fault=on_fault)
    publisher.offer(weights(0), step=0)
    assert told.wait(DEADLINE_S)
    assert store.head() is None
    full[0] = False
    publisher.offer(weights(1), step=1)
    publisher.close()
    assert (store.head(), len(faults)) == (0, 1)


def test_last_weights_that_were_not_stored_are_told_by_close(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    publisher = Publisher(store)

    def away(data: bytes) -> str:
        raise OSError("the store is away")

    monkeypatch.setattr(store.blobs, "put", away)
    publisher.offer(weights(0), step=0)
    with pytest.raises(StoreError, match="last weights were not published: the store is away"):
        publisher.close()
    with pytest.raises(StoreError, match="was closed: step 1 came too late"):
        publisher.offer(weights(1), step=1)
    assert store.head() is None


def test_another_publisher_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store.publish(weights(0), version=0, batch=None, step=0, run_id="a")
    store.publish(weights(1), version=1, batch="x", step=1, run_id="a")
    monkeypatch.setattr(store, "head", lambda: 0)  # it looked before the other one published
    publisher = Publisher(store)
    publisher.offer(weights(2), step=2)
    with pytest.raises(StoreError, match="publisher has ended: version 1 stands already"):
        publisher.close()
    with pytest.raises(StoreError, match="publisher has ended"):
        publisher.offer(weights(3), step=3)


def test_two_runs_do_not_alternate_in_one_store() -> None:
    store = MemoryStore()
    ours, theirs = Publisher(store, run_id="a"), Publisher(store, run_id="b")
    ours.offer(weights(0), step=0)
    ours.close()
    theirs.offer(weights(1), step=0)
    with pytest.raises(StoreError, match="publisher has ended: version 0 is of run a, not of b"):
        theirs.close()
    with pytest.raises(VersionTaken, match="of run a"):
        publish(store, {"w": np.arange(500, dtype=np.uint16)}, step=1, run_id="b")
    assert store.head() == 0
