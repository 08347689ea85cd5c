"""The follower: newest version, faults are events, a death is loud."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import final

import pytest

from tidemill.core.errors import ModelError, StoreError
from tidemill.core.events import Event, EventLog, read_events
from tidemill.core.records import Snapshot
from tidemill.core.seams import Weights
from tidemill.engines.follower import Follower

DEADLINE_S = 20.0


@final
class FakeStore:
    """Only what a follower asks for."""

    def __init__(self) -> None:
        self.newest: int | None = None
        self.failures: dict[int, Exception] = {}
        self.loads: list[int] = []
        self.looked = threading.Semaphore(0)

    def head(self) -> int | None:
        self.looked.release()
        return self.newest

    def load(self, version: int) -> Weights:
        self.loads.append(version)
        if version in self.failures:
            raise self.failures[version]
        return Weights(config={"version": version}, tokenizer={}, tensors={})

    def publish(self, weights: Weights, *, version: int, batch: str | None, step: int, run_id: str) -> Snapshot:
        raise NotImplementedError

    def manifest(self, version: int) -> Snapshot:
        raise NotImplementedError

    def export(self, version: int, folder: Path) -> None:
        raise NotImplementedError


class FakeEngine:
    def __init__(self) -> None:
        self.version = -1
        self.error: Exception | None = None
        self.moved = threading.Semaphore(0)

    def swap(self, version: int, weights: Weights, *, fetch_s: float = 0.0) -> bool:
        if self.error is not None:
            raise self.error
        assert weights.config == {"version": version} and fetch_s >= 0
        self.version = version
        self.moved.release()
        return True


class Case:
    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.engine = folder, FakeStore(), FakeEngine()
        self.events = EventLog(folder, "engine-0")
        self.died: list[BaseException] = []
        self.dead = threading.Event()
        self.follower = Follower(self.store, self.engine, self.events, on_death=self._die, poll_s=0.001)

    def _die(self, error: BaseException) -> None:
        self.died.append(error)
        self.dead.set()

    def looks(self, num: int) -> None:
        for _ in range(num):
            assert self.store.looked.acquire(timeout=DEADLINE_S)

    def of(self, what: str) -> list[Event]:
        return [event for event in read_events(self.folder) if event.what == what]


@pytest.fixture
def case(tmp_path: Path) -> "Case":
    return Case(tmp_path)


def closing(test: Callable[[Case], None], case: Case) -> None:
    case.follower.start()
    try:
        test(case)
    finally:
        case.follower.close()
        case.events.close()


def test_it_goes_to_the_newest_version_and_tells(case: Case) -> None:
    def test(case: Case) -> None:
        case.looks(2)
        assert case.store.loads == []
        case.store.newest = 0
        assert case.engine.moved.acquire(timeout=DEADLINE_S)
        case.store.newest = 5
        assert case.engine.moved.acquire(timeout=DEADLINE_S)
        case.looks(3)

    closing(test, case)
    assert case.engine.version == 5 and case.store.loads == [0, 5]
    assert [event.version for event in case.of("swap")] == [0, 5] and not case.died


@pytest.mark.parametrize("where", ["fetch", "swap"])
def test_weights_that_cannot_be_used_are_one_event_and_the_next_version_is_taken(case: Case, where: str) -> None:
    def test(case: Case) -> None:
        if where == "fetch":
            case.store.failures[1] = StoreError("version 1 is damaged")
        else:
            case.engine.error = ModelError("tensor x holds NaN")
        case.store.newest = 1
        while len(case.store.loads) < 4:
            case.looks(1)
        assert case.engine.version == -1
        case.engine.error = None
        case.store.newest = 2
        assert case.engine.moved.acquire(timeout=DEADLINE_S)

    closing(test, case)
    faults = case.of("fault")
    assert len(faults) == 1 and faults[0].version == 1 and ("damaged" in faults[0].note or "NaN" in faults[0].note)
    assert case.engine.version == 2 and not case.died


def test_a_dead_follower_is_loud(case: Case) -> None:
    def test(case: Case) -> None:
        case.engine.error = RuntimeError("a bug")
        case.store.newest = 0
        assert case.dead.wait(DEADLINE_S)

    closing(test, case)
    assert [str(error) for error in case.died] == ["a bug"]
