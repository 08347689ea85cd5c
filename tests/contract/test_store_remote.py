"""The store in an object store: the contract over S3 (moto's server on the loopback), and a service that errs."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.races import race
from tidemill.core.errors import BlobError, StoreError, UsageError, VersionTaken
from tidemill.core.records import Array
from tidemill.core.seams import Weights
from tidemill.deltas import remote
from tidemill.deltas.api import publish as publish_tensors
from tidemill.deltas.api import pull
from tidemill.deltas.remote import ObjectStore

moto_server = pytest.importorskip("moto.server")
pytest.importorskip("s3fs")


def policy(version: int) -> Weights:
    words = np.arange(2000, dtype=np.uint16) * 31 + (np.arange(2000) % 97 < version)
    return Weights(
        config={"n": 2000},
        tokenizer={"tokenizer.json": b"{}"},
        tensors={"w": Array.of(words.astype(np.uint16), "uint16")},
    )


def publish(store: ObjectStore, version: int, weights: Weights | None = None) -> str:
    return store.publish(
        weights or policy(version), version=version, batch=f"b{version}" if version else None, step=version, run_id="r"
    ).kind


def right(store: ObjectStore, version: int) -> bool:
    return store.load(version).tensors["w"].data == policy(version).tensors["w"].data


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    old = {name: os.environ.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")}
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
    for name, value in old.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture
def url(endpoint: str, request: pytest.FixtureRequest) -> str:
    import s3fs

    fs = s3fs.S3FileSystem(endpoint_url=endpoint)
    if not fs.exists("weights"):
        fs.mkdir("weights")
    return f"s3://weights/{request.node.name}"


def test_versions_over_s3(endpoint: str, url: str, tmp_path: Path) -> None:
    def open_it() -> ObjectStore:
        return ObjectStore(url, options={"endpoint_url": endpoint}, keyframe_every=3)

    store = open_it()
    assert store.head() is None
    with pytest.raises(StoreError, match="no version 0"):
        store.load(0)
    assert [publish(store, version) for version in range(5)] == ["full", "delta", "delta", "full", "delta"]
    assert open_it().head() == 4 and open_it().versions() == [0, 1, 2, 3, 4]
    assert all(right(open_it(), version) for version in (4, 2, 0))
    assert publish(open_it(), 4) == "delta"  # the same again
    with pytest.raises(VersionTaken):
        publish(open_it(), 4, policy(9))
    with pytest.raises(StoreError, match="version 5 does not exist"):
        publish(store, 6)
    open_it().export(4, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 4000
    assert store.published_s(4) >= store.published_s(0) > 1e9


def test_racers_over_s3_leave_one_winner(endpoint: str, url: str) -> None:
    options = {"endpoint_url": endpoint}
    publish(ObjectStore(url, options=options), 0)
    stores = [ObjectStore(url, options=options) for _ in range(4)]
    outcomes = race(lambda seed: publish(stores[seed], 1, policy(10 + seed)), len(stores))
    assert outcomes == ["taken"] * 3 + ["won"]
    won = ObjectStore(url, options=options).load(1).tensors["w"].data
    assert won in {policy(10 + seed).tensors["w"].data for seed in range(4)}


def test_a_service_that_errs_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """503s, lost answers and cut-off reads at every fourth call: slower, never wrong."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(remote, "NUM_TRIES", 12)
    url = "memory://errs/store"
    store = ObjectStore(url, keyframe_every=4)
    rng = random.Random(0)
    faults = 0

    def erring(name: str) -> None:
        real = getattr(store._fs, name)

        def call(*args: object, **kwargs: object) -> object:
            nonlocal faults
            fault = rng.choice(["before", "after", "cut", *[""] * 9])
            if fault == "before":
                faults += 1
                raise OSError("503 Slow Down")
            result = real(*args, **kwargs)
            if fault == "after":
                faults += 1
                raise OSError("connection reset")
            if fault == "cut" and isinstance(result, bytes) and result:
                faults += 1
                return result[: rng.randrange(len(result))]
            return result

        monkeypatch.setattr(store._fs, name, call)

    for name in ("pipe_file", "cat_file", "exists", "ls"):
        erring(name)
    for version in range(60):
        publish(store, version)
        assert right(store, rng.randrange(version + 1))
    assert store.versions() == list(range(60))
    assert faults > 60


def test_a_service_that_is_away_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.0)
    store = ObjectStore("memory://away/store")
    publish(store, 0)

    def away(*_: object, **__: object) -> bytes:
        raise OSError("503 Slow Down")

    monkeypatch.setattr(store._fs, "cat_file", away)
    with pytest.raises(StoreError, match="failed 5 times: 503 Slow Down"):
        store.load(0)
    with pytest.raises(BlobError, match="failed 5 times: 503 Slow Down"):
        ObjectStore("memory://away/store").load(0)
    with pytest.raises(UsageError, match="exclusive creation"):
        ObjectStore("http://example.invalid/store")


def test_a_long_history_is_neither_held_nor_listed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://long/store"
    store, follower = ObjectStore(url), ObjectStore(url)
    publish(store, 0)
    assert follower.head() == 0

    def listed(*_: object, **__: object) -> list[str]:
        raise AssertionError("the whole history was listed")

    monkeypatch.setattr(follower._fs, "ls", listed)
    for version in range(1, 200):
        publish(store, version)
        if version % 50 == 0:
            assert follower.head() == follower.head() == version
            assert right(follower, version)
    for each in (store, follower):
        assert len(each._manifests) <= 64 and len(each.blobs._known) <= 64
    assert right(store, 0) and store.manifest(0).version == 0


def test_the_api_takes_a_url() -> None:
    url = "memory://api/store"
    publish_tensors(url, {"w": np.ones(10, np.float32)}, step=3)
    assert pull(url).manifest.step == 3
