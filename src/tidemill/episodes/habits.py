"""When an agent goes round in circles: the same call with the same result, or one malformed call after another."""

from collections.abc import Sequence
from typing import Any, final

from tidemill.core.records import Observation, Outcome
from tidemill.core.seams import Turn


@final
class Habits:
    """Of one episode; told of each turn in order."""

    def __init__(self, *, max_repeats: int, max_format_errors: int) -> None:
        self._max_repeats = max_repeats
        self._max_format_errors = max_format_errors
        self._num_invalid = 0
        self._num_same = 0
        self._last: Any = None

    def after(self, turn: Turn, observations: Sequence[Observation]) -> Outcome | None:
        """`loop` or `format_errors` where this turn was one too many."""
        if not turn.calls:
            self._num_invalid += 1
            self._last = None
            return "format_errors" if self._num_invalid >= self._max_format_errors else None
        self._num_invalid = 0
        this = (
            tuple((call.name, tuple(call.arguments.items())) for call in turn.calls),
            tuple(observation.text for observation in observations),
        )
        self._num_same = self._num_same + 1 if this == self._last else 1
        self._last = this
        return "loop" if self._num_same >= self._max_repeats else None
