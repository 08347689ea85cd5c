"""How a run stands now, cheaply enough to be asked every second: the journal is counted by its database, and of the
logs only what is new is read. `reports.status` tells the same once, and in full."""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, final

import msgspec

from tidemill.core.events import Event
from tidemill.core.journal import JournalCounts, read_counts
from tidemill.core.metrics import Row
from tidemill.reports.evaluation import EvalRow
from tidemill.reports.live.tail import Tail
from tidemill.reports.status import is_done, is_running, tells_phase

T = TypeVar("T")
State = Literal["preparing", "running", "stopping", "stopped", "halted", "finished"]
Stage = Literal["start", "cpt", "sft", "rl"]
TEXT_STAGES: tuple[Stage, ...] = ("cpt", "sft")

RATE_S = 60.0
"""Rollouts' tokens per second are those of the last minute."""
NUM_REWARDS = 400
NUM_INTERVALS = 10
"""Steps whose median time the end is reckoned from."""
CORES_S = 5.0
MAX_FIRST_BYTES = 1 << 18
ROUTINE = frozenset({"episode", "generate", "grade", "wait", "served"})
"""Events of every moment: not news."""
STOPPED = 143
"""Exit code of a service that was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One look at a run. What is not known yet is None or empty."""

    run_id: str
    state: State
    cause: str = ""
    """Of a halt."""
    stage: Stage = "start"
    done: int = 0
    """Steps of pre-training or of demonstrations, or versions of RL."""
    total: int | None = None
    elapsed_s: float | None = None
    """Since its services were started."""
    eta_s: float | None = None
    """To the end of the stage."""
    rewards: tuple[float, ...] = ()
    """Mean reward of each update, oldest first."""
    last: Mapping[str, float | int | str] = field(default_factory=dict)
    """The learner's last row."""
    counts: JournalCounts | None = None
    rollout_tokens_per_s: float | None = None
    cores: Mapping[str, float] = field(default_factory=dict)
    """Kind of service → cores that it keeps busy."""
    evaluations: tuple[tuple[int, float, int], ...] = ()
    """Version, share solved, number of attempts; oldest first."""
    news: Event | None = None
    fault: Event | None = None


@final
class Follower:
    """Looks at one run again and again. Damaged or half-written lines are passed over: the audit tells of them."""

    def __init__(self, folder: Path, *, run_id: str, totals: Mapping[str, int] | None = None) -> None:
        """`totals`: stage → number of steps."""
        self._folder = folder
        self._run_id = run_id
        self._totals = dict(totals or {})
        self._metrics = Tail(folder / "metrics.jsonl", max_first_bytes=MAX_FIRST_BYTES)
        self._samples = Tail(folder / "proc.jsonl", max_first_bytes=MAX_FIRST_BYTES)
        self._evaluations = Tail(folder / "eval.jsonl")
        self._events: dict[Path, Tail] = {}
        self._row: Row = {}
        self._rewards: deque[float] = deque(maxlen=NUM_REWARDS)
        self._times_s: deque[float] = deque(maxlen=NUM_INTERVALS + 1)
        self._used: dict[str, deque[tuple[float, float]]] = {}
        self._solved: dict[tuple[int, str, int], bool] = {}
        self._started_s: float | None = None
        self._news: Event | None = None
        self._fault: Event | None = None
        self._phase: Event | None = None

    def look(self, *, now_s: float | None = None, is_over: bool = False) -> Facts:
        """`is_over`: its owner, who still holds the folder, has ended it.

        Raises `RunFolderError` where the journal is none, or of another version.
        """
        clock_s = time.time() if now_s is None else now_s
        self._read_metrics()
        self._read_samples()
        self._read_evaluations()
        self._read_events()
        elapsed_s = self._elapsed_s(clock_s)
        window_s = min(RATE_S, max(elapsed_s or RATE_S, 1.0))
        version, counts = newest_version(self._folder), None
        if (self._folder / "journal.sqlite").is_file():
            counts = read_counts(self._folder / "journal.sqlite", head=version, since_s=clock_s - window_s)
        stage, done, total = self._place(version, counts)
        cause = self._cause(counts)
        state = self._state(version, counts, cause, is_over)
        is_going = state in ("running", "stopping")
        return Facts(
            run_id=self._run_id,
            state=state,
            cause=cause,
            stage=stage,
            done=done,
            total=total,
            elapsed_s=elapsed_s,
            eta_s=self._eta_s(stage, done, total, clock_s) if state == "running" else None,
            rewards=tuple(self._rewards),
            last=self._row,
            counts=counts,
            rollout_tokens_per_s=counts.recent_tokens / window_s if counts is not None and is_going else None,
            cores=self._cores(clock_s) if is_going else {},
            evaluations=self._shares(),
            news=self._news,
            fault=self._fault,
        )

    # --- what is new -----------------------------------------------------------------------------------------

    def _read_metrics(self) -> None:
        lines, begins = self._metrics.read()
        if begins:
            self._row = {}
            self._rewards.clear()
            self._times_s.clear()
        for line in lines:
            row = _decoded(line, Row)
            if row is None:
                continue
            if row.get("stage") != self._row.get("stage"):
                self._times_s.clear()
            self._row = row
            self._times_s.append(float(row.get("time_s", 0.0)))
            if row.get("stage") == "rl":
                self._rewards.append(float(row.get("reward_mean", 0.0)))

    def _read_samples(self) -> None:
        for line in self._samples.read()[0]:
            row = _decoded(line, dict[str, float | str])
            if row is None or not {"who", "at_s", "ticks", "ticks_per_s"} <= row.keys():
                continue
            at_s, used_s = float(row["at_s"]), float(row["ticks"]) / float(row["ticks_per_s"])
            samples = self._used.setdefault(str(row["who"]), deque())
            if samples and used_s < samples[-1][1]:  # it was started again
                samples.clear()
            samples.append((at_s, used_s))
            while len(samples) > 2 and samples[0][0] < at_s - CORES_S:
                samples.popleft()

    def _read_evaluations(self) -> None:
        lines, begins = self._evaluations.read()
        if begins:
            self._solved.clear()
        for line in lines:
            row = _decoded(line, EvalRow)
            if row is not None:
                self._solved.setdefault((row.version, row.task_id, row.sample), row.solved)

    def _read_events(self) -> None:
        for path in sorted((self._folder / "events").glob("*.jsonl")):
            tail = self._events.setdefault(path, Tail(path, max_first_bytes=MAX_FIRST_BYTES))
            for line in tail.read()[0]:
                if any(f'"what":"{what}"'.encode() in line[:80] for what in ROUTINE):
                    continue
                event = _decoded(line, Event)
                if event is None or event.what in ROUTINE:
                    continue
                if tells_phase(event) and _is_later(event, self._phase):
                    self._phase = event
                if is_fault(event):
                    self._fault = event if _is_later(event, self._fault) else self._fault
                elif event.what != "stopping" and _is_later(event, self._news):  # the state says that
                    self._news = event

    # --- what follows from it --------------------------------------------------------------------------------

    def _place(self, version: int, counts: JournalCounts | None) -> tuple[Stage, int, int | None]:
        """Stage, how far it is, and of how much."""
        updates = None if counts is None else counts.config.get("num_updates")
        if version >= 0:
            return "rl", version, self._totals.get("rl", updates if isinstance(updates, int) else None)
        for stage in TEXT_STAGES:
            if self._row.get("stage") == stage:
                return stage, int(float(self._row.get("stage_step", 0))), self._totals.get(stage)
        return "start", 0, None

    def _cause(self, counts: JournalCounts | None) -> str:
        if counts is not None and counts.halted:
            return counts.halted
        path = self._folder / "halted"
        return path.read_text(errors="replace").strip() if path.exists() else ""

    def _state(self, version: int, counts: JournalCounts | None, cause: str, is_over: bool) -> State:
        if not is_over and is_running(self._folder):
            if not any((self._folder / "services").glob("*.json")):
                return "preparing"
            return "stopping" if self._phase is not None and self._phase.what == "stopping" else "running"
        if cause:
            return "halted"
        is_last = counts is not None and version == counts.config.get("num_updates")
        return "finished" if is_last and is_done(self._phase) else "stopped"

    def _elapsed_s(self, clock_s: float) -> float | None:
        starts = []
        for path in (self._folder / "services").glob("*.json"):
            info = _decoded(path.read_bytes(), dict[str, float | str | None]) if path.exists() else None
            if info is not None and info.get("starts") == 1:
                starts.append(float(info.get("started_s") or clock_s))
        if starts:
            self._started_s = min(starts)
        return None if self._started_s is None else max(0.0, clock_s - self._started_s)

    def _eta_s(self, stage: Stage, done: int, total: int | None, clock_s: float) -> float | None:
        times = list(self._times_s)
        if total is None or done >= total or len(times) < 3 or self._row.get("stage") != stage:
            return None
        step_s = statistics.median(after - before for before, after in itertools.pairwise(times))
        return max(0.0, step_s * (total - done) - min(step_s, clock_s - times[-1]))

    def _cores(self, clock_s: float) -> dict[str, float]:
        busy: dict[str, float] = {}
        for who, samples in sorted(self._used.items()):
            (from_s, before), (to_s, after) = samples[0], samples[-1]
            if to_s > from_s and clock_s - to_s < 2 * CORES_S:
                kind = who.rpartition("-")[0]
                busy[kind] = busy.get(kind, 0.0) + (after - before) / (to_s - from_s)
        return busy

    def _shares(self) -> tuple[tuple[int, float, int], ...]:
        by_version: dict[int, list[bool]] = {}
        for (version, _, _), solved in self._solved.items():
            by_version.setdefault(version, []).append(solved)
        return tuple((version, sum(found) / len(found), len(found)) for version, found in sorted(by_version.items()))


def is_fault(event: Event) -> bool:
    """Whether something went wrong, that the run may have mended since."""
    if event.what in ("fault", "reject"):
        return True
    exit_code = event.numbers.get("exit_code", 0)
    return event.what == "stop" and exit_code not in (0, STOPPED)


def newest_version(folder: Path) -> int:
    """−1 where nothing was published yet."""
    names = (path.stem for path in (folder / "store" / "versions").glob("[0-9]*.json"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


def _is_later(event: Event, other: Event | None) -> bool:
    return other is None or event.to_s >= other.to_s


def _decoded(line: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
