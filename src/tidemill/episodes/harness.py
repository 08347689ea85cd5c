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

import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import final

from tidemill.core.errors import EngineUnavailable, RequestRefused
from tidemill.core.grammar import Grammar
from tidemill.core.records import Attempt, Episode, Generation, Outcome, Step, StopReason, Task
from tidemill.core.seams import Chunk, Engine, Environment, GenerationRequest, Pointing, Renderer
from tidemill.episodes.conduct import Conduct, Fault, HarnessConfig, WallLimit
from tidemill.episodes.generation import GenerationBuilder, Sampling
from tidemill.episodes.outages import EngineGone
from tidemill.text.ledger import Ledger


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
        config=config,
        clock=clock,
    )
    return await run.whole(renderer=renderer.name, sandbox_tier=sandbox_tier)


@final
class _Run(Conduct):
    """Turns in token ids."""

    def __init__(
        self,
        *,
        task: Task,
        attempt: Attempt,
        environment: Environment,
        renderer: Renderer,
        engine: Engine,
        sampling: Sampling,
        engine_name: str,
        config: HarnessConfig | None,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(task=task, attempt=attempt, environment=environment, config=config, clock=clock)
        self.renderer = renderer
        self.engine = engine
        self.sampling = sampling
        self.engine_name = engine_name
        self.ledger = Ledger()
        self.pending_ids: list[int] = []
        self.num_sampled = 0

    async def play(self, text: str) -> Outcome:
        self.append(self.renderer.open(self.environment.tools, text))
        self.glossary = self.renderer.glossary
        if self.num_left() <= 0:
            raise Fault(
                f"the task opens with {len(self.ledger)} tokens of {self.task.limits.max_context_tokens}: "
                "raise max_context_tokens, or shorten it"
            )
        habits = self.config.habits()
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
        except WallLimit:
            return "wall_limit"

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
            grammar=self.grammar(),
        )
        while True:
            num_before, asked_s = len(builder.token_ids), self.clock()
            try:
                await self.stream(builder)
                cause = "the engine let go of the generation"
            except EngineUnavailable as error:
                cause = str(error)
            except RequestRefused as error:
                raise Fault(f"the engine refused the request: {error}") from error
            except WallLimit:
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
                raise Fault(str(error)) from error

    def grammar(self) -> Grammar | None:
        """Of the next call, as the environment stands."""
        if not self.sampling.constrained:
            return None
        with self.own_cpu():
            spans = self.environment.spans() if isinstance(self.environment, Pointing) else None
            return self.renderer.grammar(self.environment.tools, spans)

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
            grammar=builder.grammar,
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


def _seed(seed: int, position: int) -> int:
    """Of one request: the same for the same place in an attempt, and no other."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=4).digest(), "big")
