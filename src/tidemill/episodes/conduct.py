"""What every episode has, whoever plays it: opening, tool calls, limits, scoring, record. Turns are the subclass's."""

import asyncio
import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tidemill.core.records import (
    Array,
    Attempt,
    Episode,
    EpisodeEvent,
    Generation,
    Observation,
    Outcome,
    Segment,
    Step,
    Task,
    ToolCall,
)
from tidemill.core.seams import Environment, Feedback, Score, ToolSpec, Turn
from tidemill.episodes.habits import Habits
from tidemill.episodes.outages import Outages

HARNESS_VERSION = "1"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """When an episode is given up, beside the task's own limits."""

    max_repeats: int = 4
    """Turns in a row with the same calls and the same results."""
    max_format_errors: int = 3
    """Turns in a row without a valid call."""
    engine_patience_s: float = 120.0
    """How long an engine may be away, at a stretch."""
    environment_s: float = 180.0
    """How long the environment may take to open, and to score."""

    def __post_init__(self) -> None:
        if self.max_repeats < 2 or self.max_format_errors < 1:
            raise ValueError(f"max_repeats {self.max_repeats} must be >= 2, max_format_errors >= 1")
        if not (self.engine_patience_s >= 0 and self.environment_s > 0):
            raise ValueError(f"engine_patience_s {self.engine_patience_s} and environment_s must be positive")

    def habits(self) -> Habits:
        return Habits(max_repeats=self.max_repeats, max_format_errors=self.max_format_errors)


class Fault(Exception):
    """The machine failed, not the agent."""


class WallLimit(Exception):
    """The agent's time is up."""


def harness_hash(tools: Sequence[ToolSpec], renderer: str) -> str:
    """Of the tool schemas, the renderer and the harness's version: equal in training, evaluation and service."""
    parts = [HARNESS_VERSION, renderer, [[tool, list(tool.parameters)] for tool in tools]]
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


class Conduct(ABC):
    """State of one episode, and its boundaries: what fails behind each of them is told from what the agent did."""

    def __init__(
        self,
        *,
        task: Task,
        attempt: Attempt,
        environment: Environment,
        config: HarnessConfig | None,
        clock: Callable[[], float],
    ) -> None:
        self.task = task
        self.attempt = attempt
        self.environment = environment
        self.config = config or HarnessConfig()
        self.clock = clock
        self.glossary: tuple[str, ...] = ()
        self.steps: list[Step] = []
        self.events: list[EpisodeEvent] = []
        self.timings_s: dict[str, float] = {}
        self.harness_cpu_s = 0.0
        self.num_malformed = 0
        self.outages = Outages(self.config.engine_patience_s, self.clock)
        self.begun_s = self.opened_s = self.clock()

    @abstractmethod
    async def play(self, text: str) -> Outcome:
        """Turn after turn, from the first text that the agent sees. May raise `Fault`."""

    async def whole(self, *, renderer: str, sandbox_tier: str) -> Episode:
        """Open, play, score; the environment is closed in any case."""
        try:
            outcome, score = await self.play_and_score()
        finally:
            await self.close()
        return self.episode(outcome, score, renderer, sandbox_tier)

    async def play_and_score(self) -> tuple[Outcome, Score]:
        try:
            text = await self.environment_does("sandbox_open", self.environment.open(self.task))
            self.opened_s = self.clock()  # opening is not the agent's time
            self.note("opened", "")
            outcome = await self.play(text)
            self.note("ended", outcome)
            score = await self.environment_does("grade", self.environment.score(outcome))
            bad = {name: value for name, value in score.rewards.items() if not math.isfinite(value)}
            if bad:
                raise Fault(f"rewards that are no numbers: {bad}")
            return outcome, score
        except Fault as fault:
            self.note("fault", str(fault))
            return "env_fault", Score(rewards={})

    async def act(self, generation: Generation, turn: Turn) -> tuple[list[Observation], Outcome | None]:
        """Run the calls of a turn, record the step; returns what they brought, and how the episode ends, if it does."""
        observations: list[Observation] = []
        ends: Outcome | None = None
        try:
            for call in turn.calls:
                feedback = await self.call(call)
                observations.append(Observation(call_id=call.id, text=feedback.text, error=feedback.error))
                ends = feedback.ends
                if ends is not None:
                    break
            for error in turn.errors:
                self.num_malformed += 1
                self.note("malformed", f"{error.call_id}: {error.error}")
                observations.append(error)
        finally:
            self.steps.append(
                Step(generation=generation, text=turn.text, calls=turn.calls, observations=tuple(observations))
            )
        return observations, ends

    # --- boundaries ------------------------------------------------------------------------------------------

    async def limited(self, stage: str, work: Callable[[], Awaitable[T]]) -> T:
        """Raises `WallLimit` once the agent's time is up."""
        left_s = self.task.limits.wall_s - (self.clock() - self.opened_s - self.outages.away_s)
        if left_s <= 0:
            raise WallLimit
        with self.timed(stage):
            try:
                async with asyncio.timeout(left_s) as limit:
                    return await work()
            except TimeoutError:
                if limit.expired():
                    raise WallLimit from None
                raise

    async def call(self, call: ToolCall) -> Feedback:
        """Whatever the environment's own code raises is the machine's fault."""
        try:
            return await self.limited("tools", lambda: self.environment.call(call))
        except WallLimit:
            raise
        except Exception as error:
            raise Fault(f"{call.name}: {type(error).__name__}: {error}") from error

    async def environment_does(self, stage: str, work: Awaitable[T]) -> T:
        """Opening and scoring: not the agent's time, and whatever fails is the machine's fault."""
        with self.timed(stage):
            try:
                async with asyncio.timeout(self.config.environment_s):
                    return await work
            except Exception as error:
                raise Fault(f"{stage}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        with self.timed("close"):
            try:
                await self.environment.close()
            except Exception as error:
                self.note("close_failed", f"{type(error).__name__}: {error}")

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start_s = self.clock()
        try:
            yield
        finally:
            self.timings_s[stage] = self.timings_s.get(stage, 0.0) + self.clock() - start_s

    @contextmanager
    def own_cpu(self) -> Iterator[None]:
        """Around code that does not wait, so that the thread's CPU time is this episode's."""
        start_s = time.thread_time()
        try:
            yield
        finally:
            self.harness_cpu_s += time.thread_time() - start_s

    def note(self, what: str, detail: str) -> None:
        self.events.append(EpisodeEvent(at_s=self.clock() - self.begun_s, what=what, detail=detail[:1000]))

    # --- the record ------------------------------------------------------------------------------------------

    def measures(self) -> dict[str, float]:
        """Of the agent's conduct, beside what the environment measures."""
        return {"steps": float(len(self.steps)), "malformed_calls": float(self.num_malformed)}

    def episode(self, outcome: Outcome, score: Score, renderer: str, sandbox_tier: str) -> Episode:
        segment = Segment(
            steps=tuple(self.steps),
            opened_by="start",
            closing_ids=Array.of([], "int32"),
            glossary=self.glossary,
        )
        return Episode(
            attempt_id=self.attempt.id,
            group_id=self.attempt.group_id,
            task_id=self.task.id,
            stage=self.attempt.stage,
            seed=self.attempt.seed,
            segments=(segment,) if self.steps else (),
            outcome=outcome,
            reward=float(sum(score.rewards.values())),
            rewards=dict(score.rewards),
            measures={**score.measures, **self.measures()},
            verdict=dict(score.verdict),
            patch=dict(score.patch),
            events=tuple(self.events),
            timings_s={**self.timings_s, "engine_away": self.outages.away_s},
            cpu_s={**score.cpu_s, "harness": self.harness_cpu_s},
            harness_hash=harness_hash(self.environment.tools, renderer),
            reward_version=self.environment.reward_version,
            sandbox_tier=sandbox_tier,
        )
