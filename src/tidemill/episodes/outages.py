"""Waiting for an engine that went away: longer each time, and not for ever."""

import asyncio
from collections.abc import Callable
from typing import final

FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0


class EngineGone(Exception):
    """The engine stayed away for longer than patience lasts."""


@final
class Outages:
    """Of one episode. `away_s` is time that the agent did not have, and is not charged for."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self.away_s = 0.0
        self._patience_s = patience_s
        self._clock = clock
        self._since_s: float | None = None
        self._backoff_s = FIRST_BACKOFF_S

    def progressed(self) -> None:
        """The engine brought something: patience is whole again."""
        self._since_s = None
        self._backoff_s = FIRST_BACKOFF_S

    async def wait(self, asked_s: float, cause: str, *, at_least_s: float = 0.0) -> None:
        """Before asking again, after a request of `asked_s` brought nothing; `at_least_s`: how long the engine asked to
        be left alone. Raises `EngineGone`."""
        if self._since_s is None:
            self._since_s = asked_s
        left_s = self._patience_s - (self._clock() - self._since_s)
        if left_s <= 0:
            raise EngineGone(f"the engine stayed away for {self._patience_s} s: {cause}")
        await asyncio.sleep(min(max(self._backoff_s, at_least_s), left_s))
        self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
        self.away_s += self._clock() - asked_s
