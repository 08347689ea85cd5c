"""Publishes version after version, in the background: the trainer hands over its weights and goes on."""

import threading
from collections.abc import Callable
from typing import NamedTuple, final

from tidemill.core.errors import BlobError, StoreError, VersionTaken
from tidemill.core.records import Snapshot
from tidemill.core.seams import Store, Weights


def publish_next(store: Store, weights: Weights, *, batch: str | None, step: int, run_id: str) -> Snapshot:
    """Publish under the number after the newest; version 0 comes from no batch. Raises as `Store.publish` does."""
    head = store.head()
    version = 0 if head is None else head + 1
    return store.publish(weights, version=version, batch=batch if version else None, step=step, run_id=run_id)


class _Offer(NamedTuple):
    weights: Weights
    step: int
    batch: str | None


@final
class Publisher:
    """One thread that encodes and stores; the trainer never waits for it.

    Weights that are offered while the last ones are still under way wait; newer ones take their place, and the older
    ones are skipped: a follower may jump. So versions count publications, and a manifest's `step` says of which step.
    What cannot be stored (disk full, store away) is told to `on_fault`; the next offer tries again, and where
    there is none `close` raises it. A publisher of another `run_id` in the same store is the end: `offer` and `close`
    raise it.
    """

    def __init__(
        self,
        store: Store,
        *,
        run_id: str = "",
        on_published: Callable[[Snapshot], None] = lambda _: None,
        on_fault: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._on_published = on_published
        self._on_fault = on_fault
        self._waiting: _Offer | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._death: BaseException | None = None
        self._failure: Exception | None = None
        """Of the newest weights that were tried; None where they were published."""
        self.num_published = 0
        self.num_skipped = 0
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def offer(self, weights: Weights, *, step: int, batch: str | None = None) -> None:
        """Returns at once. The weights must not change afterwards. Raises what ended the publisher, or `StoreError`
        where it was closed."""
        with self._changed:
            self._check()
            if self._closing:
                raise StoreError(f"the publisher was closed: step {step} came too late")
            if self._waiting is not None:
                self.num_skipped += 1
            self._waiting = _Offer(weights, step, batch)
            self._changed.notify_all()

    def close(self) -> None:
        """Publishes what waits, and ends the thread. Raises what ended the publisher, or `StoreError` where the newest
        weights could not be stored."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._check()
            if self._failure is not None:
                raise StoreError(f"the last weights were not published: {self._failure}") from self._failure

    def _check(self) -> None:
        if self._death is not None:
            raise StoreError(f"the publisher has ended: {self._death}") from self._death

    def _run(self) -> None:
        try:
            while (offer := self._next()) is not None:
                self._publish(offer)
        except BaseException as error:  # a dead background loop must stop whoever relies on it
            with self._changed:
                self._death = error

    def _next(self) -> _Offer | None:
        with self._changed:
            while self._waiting is None and not self._closing:
                self._changed.wait()
            offer, self._waiting = self._waiting, None
            return offer

    def _publish(self, offer: _Offer) -> None:
        try:
            snapshot = publish_next(self._store, offer.weights, batch=offer.batch, step=offer.step, run_id=self._run_id)
        except VersionTaken:
            raise
        except (StoreError, BlobError, OSError) as error:
            self._failure = error
            self._on_fault(error)
        else:
            self._failure = None
            self.num_published += 1
            self._on_published(snapshot)
