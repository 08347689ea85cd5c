"""One at a time per key: of several attempts that want the same result, one works it out and the others wait for it."""

import asyncio
from typing import final
from weakref import WeakValueDictionary


@final
class Turns:
    """Of one event loop. A lock lives as long as someone holds or awaits it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, key: str) -> asyncio.Lock:
        """To be held while the key's result is looked up and, where it is missing, made."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock
