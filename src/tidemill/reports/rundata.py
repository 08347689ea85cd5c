"""What a report reads of a run folder: the journal, the learner's log, events, evaluations, samples and episodes."""

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tidemill.core.blobs import FolderBlobs, get_record
from tidemill.core.errors import BlobError, RunFolderError
from tidemill.core.events import Event, read_events
from tidemill.core.journal import AttemptRow, GroupRow, JournalRows, read_journal
from tidemill.core.metrics import Row, read_metrics
from tidemill.core.records import Batch, Episode, Snapshot
from tidemill.reports.evaluation import EvalRow, read_rows


@dataclass(frozen=True)
class RunData:
    """A run folder, read as it is asked for."""

    folder: Path

    def __post_init__(self) -> None:
        if not (self.folder / "journal.sqlite").is_file():
            raise RunFolderError(f"{self.folder} is no run: it holds no journal.sqlite; give the --out folder of a run")

    @cached_property
    def journal(self) -> JournalRows:
        try:
            return read_journal(self.folder / "journal.sqlite")
        except (sqlite3.DatabaseError, KeyError, ValueError) as error:
            raise RunFolderError(
                f"{self.folder / 'journal.sqlite'} is damaged ({error}): restore it from its backup"
            ) from error

    @cached_property
    def metrics(self) -> list[Row]:
        return _readable(read_metrics, self.folder / "metrics.jsonl")

    @cached_property
    def events(self) -> list[Event]:
        return _readable(read_events, self.folder / "events")

    @cached_property
    def evaluations(self) -> list[EvalRow]:
        return _readable(read_rows, self.folder / "eval.jsonl")

    @cached_property
    def blobs(self) -> FolderBlobs:
        return FolderBlobs(self.folder / "blobs")

    @cached_property
    def versions(self) -> dict[int, float]:
        """Published version → Unix time: of its manifest, or of the learner's event where the folder was copied."""
        found = {}
        for path in sorted((self.folder / "store" / "versions").glob("[0-9]*.json")):
            found[int(path.stem)] = path.stat().st_mtime
        for event in self.events:
            if event.what == "publish" and event.version in found:
                found[event.version] = min(found[event.version], event.to_s)
        return found

    @property
    def head(self) -> int:
        """−1 where nothing was published yet."""
        return max(self.versions, default=-1)

    def version_file(self, version: int, name: str) -> bytes | None:
        """A file of a published version, such as `tokenizer.json`; None where it is not there."""
        path = self.folder / "store" / "versions" / f"{version:08d}.json"
        try:
            snapshot = msgspec.json.decode(path.read_bytes(), type=Snapshot)
            return FolderBlobs(self.folder / "store" / "blobs").get(snapshot.files[name])
        except (OSError, KeyError, msgspec.DecodeError, BlobError):
            return None

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Lines of `proc.jsonl`; damaged ones are the audit's business."""
        path = self.folder / "proc.jsonl"
        rows = []
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows

    @cached_property
    def groups(self) -> dict[str, GroupRow]:
        return {group.id: group for group in self.journal.groups}

    @cached_property
    def finished(self) -> list[AttemptRow]:
        """Finished attempts of the RL stage, by the time at which they ended."""
        rows = [a for a in self.journal.attempts if a.outcome is not None and self.groups[a.group_id].stage == "rl"]
        return sorted(rows, key=lambda row: row.done_at_s or 0.0)

    @cached_property
    def batches(self) -> dict[int, Batch]:
        """Those whose blob can be read."""
        found = {}
        for row in self.journal.batches:
            try:
                found[row.index] = get_record(self.blobs, row.blob, Batch)
            except BlobError:
                continue
        return found

    @cached_property
    def start_s(self) -> float:
        """Of the first event."""
        return min((event.from_s for event in self.events), default=0.0)

    @cached_property
    def end_s(self) -> float:
        return max([event.to_s for event in self.events] + list(self.versions.values()), default=self.start_s)

    def episode(self, name: str | None) -> Episode | None:
        """None where there is none, or where it cannot be read."""
        if name is None:
            return None
        try:
            return get_record(self.blobs, name, Episode)
        except BlobError:
            return None

    def cpu_rates(self) -> dict[str, list[tuple[float, float]]]:
        """Service → (Unix time, cores busy since the sample before)."""
        rates: dict[str, list[tuple[float, float]]] = {}
        last: dict[str, tuple[float, float]] = {}
        for row in self.samples:
            who, at_s, used_s = row["who"], row["at_s"], row["ticks"] / row["ticks_per_s"]
            before = last.get(who)
            last[who] = (at_s, used_s)
            if before is not None and at_s > before[0] and used_s >= before[1]:
                rates.setdefault(who, []).append((at_s, (used_s - before[1]) / (at_s - before[0])))
        return rates


T = TypeVar("T")


def _readable(read: Callable[[Path], T], path: Path) -> T:
    """Raises `RunFolderError` for a damaged file, in one line."""
    try:
        return read(path)
    except ValueError as error:
        raise RunFolderError(f"a log of the run is damaged: {error}") from error
