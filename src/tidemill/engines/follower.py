"""Keeps an engine at the newest published version: looks at the store, fetches, hands over, in a thread of its own."""

import threading
import time
from collections.abc import Callable
from typing import Protocol, final

from tidemill.core.errors import BlobError, ModelError, StoreError
from tidemill.core.events import EventLog
from tidemill.core.seams import Store, Weights


class Swappable(Protocol):
    """What a follower asks of an engine."""

    @property
    def version(self) -> int: ...

    def swap(self, version: int, weights: Weights, *, fetch_s: float = 0.0) -> bool: ...


@final
class Follower:
    """Watches the store's head. Weights that cannot be fetched or used are an event, and the old version serves on.

    Anything else ends the thread and calls `on_death`, from it: a run must not go on with an engine that is stuck.
    """

    def __init__(
        self,
        store: Store,
        engine: Swappable,
        events: EventLog,
        *,
        on_death: Callable[[BaseException], None],
        poll_s: float = 0.2,
    ) -> None:
        self._store = store
        self._engine = engine
        self._events = events
        self._on_death = on_death
        self._poll_s = poll_s
        self._stop = threading.Event()
        self._last_fault = ""
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Returns when the thread has ended. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._follow()
                self._stop.wait(self._poll_s)
        except BaseException as error:  # a dead background loop must stop the run, whatever killed it
            if not self._stop.is_set():
                self._on_death(error)

    def _follow(self) -> None:
        version: int | None = None
        try:
            version = self._store.head()
            if version is None or version <= self._engine.version:
                return
            start_s, start = time.time(), time.monotonic()
            weights = self._store.load(version)
            fetch_s = time.monotonic() - start
            if self._engine.swap(version, weights, fetch_s=fetch_s):
                self._events.write("swap", from_s=start_s, version=version, numbers={"fetch_s": fetch_s})
            self._last_fault = ""
        except (StoreError, BlobError, ModelError, OSError) as error:
            # The same fault at every look would fill the log: one event for each new one.
            note = f"version {version}: {type(error).__name__}: {error}"
            if note != self._last_fault:
                self._events.write("fault", version=version, note=note)
                self._last_fault = note
