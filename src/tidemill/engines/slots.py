"""Places for sequences in an engine: which positions have keys and values, by which version, for which session."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from tidemill.models.config import ModelConfig
from tidemill.models.transformer import KVCache

_MIN_COPY_TOKENS = 16
"""A shorter common prefix is computed again rather than copied from another session."""


@final
class Slot:
    """One sequence. Positions below `num_fed` have valid keys and values in cache row `row`."""

    def __init__(self, row: int, config: ModelConfig, context_tokens: int) -> None:
        self.row = row
        self.session: str | None = None
        self.busy = False
        self.last_used = 0
        self.ids: NDArray[np.int32] = np.zeros(context_tokens, np.int32)
        self.num_fed = 0
        self.num_recorded = 0
        """Positions with a row in `kv_versions` and `routes`; above `num_fed` only while KV is being recomputed."""
        self.kv_versions: NDArray[np.int32] = np.zeros(context_tokens, np.int32)
        self.routes: NDArray[np.uint16] = np.zeros(
            (context_tokens, config.num_layers, config.experts_per_token), np.uint16
        )
        self.num_reported = 0
        """Rows that finished generations have brought to the client. One that lost the last chunk of a stream lacks
        its last token too, so that its next prompt ends within these rows, and `truncate` takes that back."""

    def truncate(self, num_tokens: int) -> None:
        """Forget what lies at `num_tokens` and beyond."""
        self.num_fed = min(self.num_fed, num_tokens)
        self.num_recorded = min(self.num_recorded, num_tokens)
        if self.num_reported > num_tokens:
            self.num_reported = 0

    def record(self, start: int, routes: NDArray[Any], version: int) -> None:
        """Note what computed positions from `start` on; rows that exist stand: their tokens were sampled under them."""
        end = start + routes.shape[0]
        if (first := max(start, self.num_recorded)) < end:
            self.kv_versions[first:end] = version
            self.routes[first:end] = routes[first - start :]
            self.num_recorded = end
        self.num_fed = end


@final
class Slots:
    """All places of an engine, with the cache behind them. A session keeps its place until another needs it."""

    def __init__(self, config: ModelConfig, num_slots: int, context_tokens: int) -> None:
        self.cache = KVCache(config, num_slots, context_tokens)
        self._slots = [Slot(row, config, context_tokens) for row in range(num_slots)]
        self._by_row = list(self._slots)
        self._clock = 0

    def acquire(self, session: str, prompt: NDArray[np.int32], version: int) -> Slot | None:
        """A place whose first `num_fed` positions are a prefix of the prompt (its last token is always fed anew).

        The session's own place where it is free, else the one least recently used; None where all are busy. Keys and
        values of other sessions are copied for a common prefix, but only those of the present version.
        """
        idle = [slot for slot in self._slots if not slot.busy]
        if not idle:
            return None
        own = next((slot for slot in idle if slot.session == session), None)
        slot = own or min(idle, key=lambda s: (s.session is not None, s.last_used))
        usable = len(prompt) - 1
        reused = 0 if own is None else _common(slot.ids, prompt, min(usable, slot.num_fed))
        donor, shared = self._donor(prompt[:usable], version)
        if donor is not None and shared >= reused + _MIN_COPY_TOKENS:
            if donor is not slot:
                self._copy(donor, slot, shared)
            if own is None or donor is not slot:
                slot.num_reported = 0
            reused = shared
        elif own is None:
            slot.num_reported = 0
        slot.truncate(reused)
        slot.ids[: len(prompt)] = prompt
        slot.session, slot.busy = session, True
        return slot

    def release(self, slot: Slot) -> None:
        self._clock += 1
        slot.busy, slot.last_used = False, self._clock

    def forget_idle(self) -> None:
        """Drop the keys and values of every session that is not being served."""
        for slot in self._slots:
            if not slot.busy:
                slot.truncate(0)

    def wipe(self, slot: Slot) -> None:
        """Drop a place that may hold NaN, which masked attention would still pick up."""
        slot.truncate(0)
        self.cache.data[:, slot.row] = 0

    def bring_to_front(self, slots: Sequence[Slot]) -> list[Slot]:
        """Move these to cache rows 0, 1, …; returns them by row."""
        outside = [slot for slot in slots if slot.row >= len(slots)]
        if outside:
            chosen = set(map(id, slots))
            free = [slot for slot in self._by_row[: len(slots)] if id(slot) not in chosen]
            for slot, other in zip(outside, free, strict=True):
                self.cache.swap_rows(slot.row, other.row, max(slot.num_fed, other.num_fed))
                slot.row, other.row = other.row, slot.row
                self._by_row[slot.row], self._by_row[other.row] = slot, other
        return self._by_row[: len(slots)]

    def _donor(self, prefix: NDArray[np.int32], version: int) -> tuple[Slot | None, int]:
        best: Slot | None = None
        longest = 0
        for slot in self._slots:
            limit = min(len(prefix), slot.num_fed)
            if limit <= longest:
                continue
            older = np.flatnonzero(slot.kv_versions[:limit] != version)
            shared = _common(slot.ids, prefix, int(older[0]) if older.size else limit)
            if shared > longest:
                best, longest = slot, shared
        return best, longest

    def _copy(self, source: Slot, target: Slot, num_tokens: int) -> None:
        self.cache.copy_row(source.row, target.row, num_tokens)
        target.ids[:num_tokens] = source.ids[:num_tokens]
        target.kv_versions[:num_tokens] = source.kv_versions[:num_tokens]
        target.routes[:num_tokens] = source.routes[:num_tokens]
        target.num_fed = target.num_recorded = num_tokens


def _common(ids: NDArray[np.int32], prompt: NDArray[np.int32], limit: int) -> int:
    """Length of the common prefix, at most `limit`."""
    different = np.flatnonzero(ids[:limit] != prompt[:limit])
    return int(different[0]) if different.size else limit
