"""The agent at work: one attempt at one task, token in, token out.

    open ──► [ generate ──► parse ──► call tools ──► observe ] ──► score ──► close
                  ▲                                     │
                  └──────────── appended ids ───────────┘

| ends as             | when                                                     | scored |
|---------------------|----------------------------------------------------------|--------|
| submitted           | a tool says so                                           | yes    |
| flagged_impossible  | a tool says so                                           | yes    |
| step_limit          | `max_steps` turns were taken                             | yes    |
| token_limit         | no token is left to sample, of the budget or the context | yes    |
| wall_limit          | `wall_s` has passed, engine outages not counted          | yes    |
| loop                | the same calls brought the same results, too often       | yes    |
| format_errors       | too many turns in a row held no valid call               | yes    |
| env_fault           | sandbox, environment, grader or engine failed            | no     |

An engine that breaks its contract (a missing logprob, …) is none of these: `EngineError` leaves the episode.
"""

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, final

import msgspec

from tidemill.core.errors import EngineUnavailable, RequestRefused
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
    StopReason,
    Task,
    ToolCall,
)
from tidemill.core.seams import Chunk, Engine, Environment, Feedback, GenerationRequest, Renderer, Score, ToolSpec, Turn
from tidemill.episodes.generation import GenerationBuilder, Sampling
from tidemill.episodes.habits import Habits
from tidemill.episodes.outages import EngineGone, Outages
from tidemill.text.ledger import Ledger

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


class _Fault(Exception):
    """The machine failed, not the agent."""


class _WallLimit(Exception):
    pass


def harness_hash(tools: Sequence[ToolSpec], renderer: str) -> str:
    """Of the tool schemas, the renderer and the harness's version: equal in training, evaluation and service."""
    parts = [HARNESS_VERSION, renderer, [[tool, list(tool.parameters)] for tool in tools]]
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


async def run_episode(
    task: Task,
    *,
    attempt: Attempt,
    environment: Environment,
    renderer: Renderer,
    engine: Engine,
    sampling: Sampling,
    engine_name: str = "engine",
    config: HarnessConfig | None = None,
    sandbox_tier: str = "none",
    clock: Callable[[], float] = time.monotonic,
) -> Episode:
    """Run one attempt to its end, whatever it is, and score it. The environment is closed in any case.

    Raises `EngineError` where the engine breaks its contract; every other failure is an `env_fault` on the episode.
    """
    run = _Run(
        task=task,
        attempt=attempt,
        environment=environment,
        renderer=renderer,
        engine=engine,
        sampling=sampling,
        engine_name=engine_name,
        config=config or HarnessConfig(),
        clock=clock,
    )
    try:
        outcome, score = await run.play_and_score()
    finally:
        await run.close()
    return run.episode(outcome, score, sandbox_tier)


@final
@dataclass(kw_only=True)
class _Run:
    """State of one episode."""

    task: Task
    attempt: Attempt
    environment: Environment
    renderer: Renderer
    engine: Engine
    sampling: Sampling
    engine_name: str
    config: HarnessConfig
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        self.pending_ids: list[int] = []
        self.steps: list[Step] = []
        self.events: list[EpisodeEvent] = []
        self.timings_s: dict[str, float] = {}
        self.harness_cpu_s = 0.0
        self.num_sampled = self.num_malformed = 0
        self.outages = Outages(self.config.engine_patience_s, self.clock)
        self.begun_s = self.opened_s = self.clock()

    # --- the loop --------------------------------------------------------------------------------------------

    async def play_and_score(self) -> tuple[Outcome, Score]:
        try:
            outcome = await self.play()
            self.note("ended", outcome)
            score = await self.environment_does("grade", self.environment.score(outcome))
            bad = {name: value for name, value in score.rewards.items() if not math.isfinite(value)}
            if bad:
                raise _Fault(f"rewards that are no numbers: {bad}")
            return outcome, score
        except _Fault as fault:
            self.note("fault", str(fault))
            return "env_fault", Score(rewards={})

    async def play(self) -> Outcome:
        text = await self.environment_does("sandbox_open", self.environment.open(self.task))
        self.opened_s = self.clock()  # opening is not the agent's time
        self.note("opened", "")
        self.append(self.renderer.open(self.environment.tools, text))
        if self.num_left() <= 0:
            raise _Fault(
                f"the task opens with {len(self.ledger)} tokens of {self.task.limits.max_context_tokens}: "
                "raise max_context_tokens, or shorten it"
            )
        habits = Habits(max_repeats=self.config.max_repeats, max_format_errors=self.config.max_format_errors)
        try:
            for turn_index in range(self.task.limits.max_steps):
                generation = await self.generate(self.num_left())
                with self.own_cpu():
                    said = generation.token_ids.numpy().tolist()
                    turn = self.renderer.parse(said, self.environment.tools, turn_index)
                observations, ends = await self.act(generation, turn)
                ends = ends or habits.after(turn, observations)
                if ends is not None:
                    return ends
                if self.num_left() <= 0:
                    return "token_limit"
                if turn_index + 1 < self.task.limits.max_steps:
                    with self.own_cpu():
                        ids = self.renderer.observe(observations, self.task.limits.max_observation_tokens)
                    if len(self.ledger) + len(ids) >= self.task.limits.max_context_tokens:
                        return "token_limit"
                    self.append(ids)
            return "step_limit"
        except _WallLimit:
            return "wall_limit"

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

    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        limits = self.task.limits
        return min(limits.max_sampled_tokens - self.num_sampled, limits.max_context_tokens - len(self.ledger))

    def append(self, ids: Sequence[int]) -> None:
        """Ids that the policy will see before it speaks next."""
        self.ledger.append("observation" if self.steps else "prompt", ids)
        self.pending_ids += ids

    # --- the engine ------------------------------------------------------------------------------------------

    async def generate(self, max_tokens: int) -> Generation:
        """One continuation, resumed as often as engines go away, within what is left of its budget."""
        builder = GenerationBuilder(
            position=len(self.ledger) - len(self.pending_ids),
            prompt_ids=self.pending_ids,
            max_tokens=max_tokens,
            sampling=self.sampling,
            engine=self.engine_name,
        )
        while True:
            num_before, asked_s = len(builder.token_ids), self.clock()
            try:
                await self.stream(builder)
                cause = "the engine let go of the generation"
            except EngineUnavailable as error:
                cause = str(error)
            except RequestRefused as error:
                raise _Fault(f"the engine refused the request: {error}") from error
            except _WallLimit:
                self.finish(builder, "abort")  # what was sampled is kept, and scored
                raise
            if builder.stop_reason in ("stop", "length"):
                self.outages.progressed()
                return self.finish(builder, builder.stop_reason)
            if builder.token_ids and builder.token_ids[-1] in self.renderer.stop_ids:
                return self.finish(builder, "stop")
            if builder.num_left == 0:
                return self.finish(builder, "length")
            self.note("engine_away", f"after {len(builder.token_ids)} tokens: {cause}")
            if len(builder.token_ids) > num_before:
                self.outages.progressed()
                asked_s = self.clock()
            try:
                await self.outages.wait(asked_s, cause)
            except EngineGone as error:
                raise _Fault(str(error)) from error

    async def stream(self, builder: GenerationBuilder) -> None:
        prompt_ids = self.ledger.request(builder.token_ids)
        self.ledger.check_extends(prompt_ids)
        request = GenerationRequest(
            session=f"{self.attempt.lease_id}/0",
            prompt_ids=prompt_ids,
            max_tokens=builder.num_left,
            stop_ids=list(self.renderer.stop_ids),
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            seed=_seed(self.attempt.seed, len(prompt_ids)),
        )
        builder.begin_stream()

        async def collect() -> None:
            chunks: AsyncIterator[Chunk] = self.engine.generate(request)
            try:
                async for chunk in chunks:
                    builder.add(chunk)
            finally:
                close = getattr(chunks, "aclose", None)
                if close is not None:
                    await close()

        await self.limited("generate", collect)

    def finish(self, builder: GenerationBuilder, stop_reason: StopReason) -> Generation:
        generation = builder.build(stop_reason)
        self.ledger.append("sampled", builder.token_ids)
        self.pending_ids = []
        self.num_sampled += len(builder.token_ids)
        if len(set(builder.versions)) > 1:
            self.note("versions", f"{min(builder.versions)} to {max(builder.versions)} in turn {len(self.steps)}")
        if stop_reason == "abort":
            text = self.renderer.parse(builder.token_ids, self.environment.tools, len(self.steps)).text
            self.steps.append(Step(generation=generation, text=text, calls=(), observations=()))
        return generation

    # --- boundaries ------------------------------------------------------------------------------------------

    async def limited(self, stage: str, work: Callable[[], Awaitable[T]]) -> T:
        """Raises `_WallLimit` once the agent's time is up."""
        left_s = self.task.limits.wall_s - (self.clock() - self.opened_s - self.outages.away_s)
        if left_s <= 0:
            raise _WallLimit
        with self.timed(stage):
            try:
                async with asyncio.timeout(left_s) as limit:
                    return await work()
            except TimeoutError:
                if limit.expired():
                    raise _WallLimit from None
                raise

    async def call(self, call: ToolCall) -> Feedback:
        """Whatever the environment's own code raises is the machine's fault."""
        try:
            return await self.limited("tools", lambda: self.environment.call(call))
        except _WallLimit:
            raise
        except Exception as error:
            raise _Fault(f"{call.name}: {type(error).__name__}: {error}") from error

    async def environment_does(self, stage: str, work: Awaitable[T]) -> T:
        """Opening and scoring: not the agent's time, and whatever fails is the machine's fault."""
        with self.timed(stage):
            try:
                async with asyncio.timeout(self.config.environment_s):
                    return await work
            except Exception as error:
                raise _Fault(f"{stage}: {type(error).__name__}: {error}") from error

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

    def episode(self, outcome: Outcome, score: Score, sandbox_tier: str) -> Episode:
        segment = Segment(steps=tuple(self.steps), opened_by="start", closing_ids=Array.of([], "int32"))
        own_measures = {"steps": float(len(self.steps)), "malformed_calls": float(self.num_malformed)}
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
            measures={**score.measures, **own_measures},
            verdict=dict(score.verdict),
            patch=dict(score.patch),
            events=tuple(self.events),
            timings_s={**self.timings_s, "engine_away": self.outages.away_s},
            cpu_s={**score.cpu_s, "harness": self.harness_cpu_s},
            harness_hash=harness_hash(self.environment.tools, self.renderer.name),
            reward_version=self.environment.reward_version,
            sandbox_tier=sandbox_tier,
        )


def _seed(seed: int, position: int) -> int:
    """Of one request: the same for the same place in an attempt, and no other."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=4).digest(), "big")
