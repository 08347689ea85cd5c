"""Episodes: shared by the worker, which trains on them, and the evaluator, which does not."""

from dataclasses import dataclass
from typing import final

import msgspec

from tidemill.core.blobs import get_record, put_record
from tidemill.core.errors import UsageError
from tidemill.core.records import Attempt, AttemptResult, Episode, Task, Tree
from tidemill.core.seams import Engine, Renderer, SandboxTier
from tidemill.episodes.demonstrations import Demonstrator
from tidemill.episodes.generation import Sampling
from tidemill.episodes.results import attempt_result
from tidemill.episodes.scripted import ScriptedEngine, spoken
from tidemill.run.config import Recipe
from tidemill.run.services.context import Context
from tidemill.run.workshop import Workshop, workshop_over
from tidemill.sandboxes.local import LocalTier
from tidemill.sandboxes.namespaces import NamespacesTier
from tidemill.tasks.folder import load
from tidemill.text.tokenizer import Tokenizer


@final
@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Plays attempts at the tasks of a run, and keeps their episodes in the blobs."""

    context: Context
    workshop: Workshop
    engine: Engine
    tokenizer: Tokenizer

    async def play(self, attempt: Attempt) -> tuple[Episode, AttemptResult]:
        """One episode, from its lease to its blob."""
        context, recipe = self.context, self.context.recipe
        task = within_context(self.workshop.tasks.task(attempt.task_id), recipe)
        demonstrated = attempt.stage == "sft"

        def engine_of(renderer: Renderer) -> Engine:
            return self._demonstrator(task, attempt, renderer) if demonstrated else self.engine

        with context.events.span("episode", ids=_ids(attempt)) as numbers:
            episode = await self.workshop.play(
                task,
                attempt,
                engine_of,
                tokenizer=self.tokenizer,
                sampling=Sampling() if demonstrated else sampling_of(recipe),  # a script says what it says
                engine_name="demonstrator" if demonstrated else "fleet",
            )
            numbers.update({f"{name}_s": value for name, value in episode.timings_s.items()})
            numbers.update({f"cpu_{name}_s": value for name, value in episode.cpu_s.items()})
            numbers["reward"] = episode.reward
        blob = put_record(context.blobs, episode)
        return episode, attempt_result(episode, blob, attempt)

    def _demonstrator(self, task: Task, attempt: Attempt, renderer: Renderer) -> ScriptedEngine:
        if task.repository is None:
            raise UsageError(f"task {task.id} has no scripted demonstrator: set demonstrations.num_episodes to 0")
        policy = Demonstrator(
            task,
            get_record(self.workshop.tasks.blobs, task.repository, Tree),
            self.workshop.vault.verifier(task.id),
            gold_probability=self.context.recipe.demonstrations.gold_probability,
            seed=attempt.seed,
        )
        return ScriptedEngine(spoken(policy, renderer))


async def open_rollouts(context: Context, engine: Engine) -> Rollouts:
    """Refuses to start where a sandbox does not hold, and takes away what a killed predecessor left."""
    tier = open_tier(context.recipe.rollouts.tier, f"{context.info.run_id}-{context.who}")
    num_reaped = tier.reap()
    context.events.write("reap", numbers={"removed": num_reaped})
    # Nothing is kept from one attempt to the next: each is played in a sandbox of its own and graded in a fresh one.
    workshop = workshop_over(load(context.tasks), tier, context.recipe.environments, keeps_verdicts=False)
    await workshop.try_sandbox()
    return Rollouts(context=context, workshop=workshop, engine=engine, tokenizer=context.tokenizer())


def within_context(task: Task, recipe: Recipe) -> Task:
    """The task, with no longer a context than the recipe's policy has."""
    longest = min(task.limits.max_context_tokens, recipe.policy.max_context_tokens)
    return msgspec.structs.replace(task, limits=msgspec.structs.replace(task.limits, max_context_tokens=longest))


def sampling_of(recipe: Recipe) -> Sampling:
    """How the policy is sampled in training, in evaluation and in service."""
    return Sampling(temperature=recipe.rl.temperature, constrained=recipe.rl.constrained)


def open_tier(name: str, label: str) -> SandboxTier:
    if name == "local":
        return LocalTier(label, i_know_this_is_not_a_sandbox=True)
    return NamespacesTier(label)


def _ids(attempt: Attempt) -> dict[str, str]:
    return {"attempt": attempt.id, "group": attempt.group_id, "task": attempt.task_id, "stage": attempt.stage}
