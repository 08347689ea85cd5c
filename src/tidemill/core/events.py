"""One schema for all that happens: who, what, from, to, version, ids. Timeline, dashboard, audit and planner read it.

Each service appends to a file of its own, `events/<who>.jsonl`: no service waits for another to tell what it did.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import msgspec

from tidemill.core.files import drop_cut_off_line
from tidemill.core.records import Record


class Event(Record, frozen=True):
    who: str
    """Service and number, such as `worker-0`."""
    what: str
    """`episode`, `generate`, `grade`, `update`, `publish`, `swap`, `wait`, `start`, `stop`, `fault`, …"""
    from_s: float
    """Unix time."""
    to_s: float
    """Equal to `from_s` for an instant."""
    version: int | None = None
    ids: dict[str, str] = {}
    """`attempt`, `group`, `task`, `batch`, … → id."""
    numbers: dict[str, float] = {}
    note: str = ""


@final
class EventLog:
    """Appends events of one service, a JSON line each; a line is written whole."""

    def __init__(self, folder: Path, who: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.who = who
        path = folder / f"{who}.jsonl"
        drop_cut_off_line(path)
        self._file = path.open("ab", buffering=0)

    def write(
        self,
        what: str,
        *,
        from_s: float | None = None,
        to_s: float | None = None,
        version: int | None = None,
        ids: dict[str, str] | None = None,
        numbers: dict[str, float] | None = None,
        note: str = "",
    ) -> None:
        now = time.time()
        event = Event(
            who=self.who,
            what=what,
            from_s=now if from_s is None else from_s,
            to_s=now if to_s is None else to_s,
            version=version,
            ids=ids or {},
            numbers=numbers or {},
            note=note,
        )
        self._file.write(msgspec.json.encode(event) + b"\n")

    @contextmanager
    def span(
        self, what: str, *, version: int | None = None, ids: dict[str, str] | None = None
    ) -> Iterator[dict[str, float]]:
        """Writes one event over the block's time; put figures into the dictionary that it yields."""
        start = time.time()
        numbers: dict[str, float] = {}
        note = ""
        try:
            yield numbers
        except BaseException as error:
            note = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.write(what, from_s=start, version=version, ids=ids, numbers=numbers, note=note)

    def close(self) -> None:
        self._file.close()


def read_events(folder: Path) -> list[Event]:
    """All events of a run, by start time. A last line cut off by a kill is skipped; any other bad line raises."""
    events: list[Event] = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines):
            if not line:
                continue
            try:
                events.append(msgspec.json.decode(line, type=Event))
            except msgspec.DecodeError as error:
                if number == len(lines) - 1:
                    continue
                raise ValueError(f"{path}, line {number + 1}: {error}") from error
    return sorted(events, key=lambda event: event.from_s)
