"""Episodes: shared by the worker, which trains on them, and the evaluator, which does not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import msgspec

from tidemill.core.blobs import get_record, put_record
from tidemill.core.errors import SandboxUnavailable, UsageError
from tidemill.core.records import Attempt, AttemptResult, Episode, Task, Tree
from tidemill.core.seams import Engine, Environment, Renderer, SandboxTier
from tidemill.episodes.demonstrations import Demonstrator
from tidemill.episodes.generation import Sampling
from tidemill.episodes.grading import Grader
from tidemill.episodes.harness import run_episode
from tidemill.episodes.mend import MendEnvironment
from tidemill.episodes.results import attempt_result
from tidemill.episodes.scripted import ScriptedEngine, spoken
from tidemill.run.config import Recipe
from tidemill.run.services.context import Context
from tidemill.sandboxes.local import LocalTier
from tidemill.sandboxes.namespaces import NamespacesTier
from tidemill.sandboxes.selftest import run as selftest
from tidemill.tasks.folder import TaskSet, load
from tidemill.tasks.vault import FolderVault
from tidemill.text.compact import CompactRenderer
from tidemill.text.tokenizer import Tokenizer


@final
@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Plays attempts at the tasks of a run, and keeps their episodes in the blobs."""

    context: Context
    tasks: TaskSet
    vault: FolderVault
    tier: SandboxTier
    engine: Engine
    tokenizer: Tokenizer
    environments: Mapping[str, Callable[[], Environment]]

    async def play(self, attempt: Attempt) -> tuple[Episode, AttemptResult]:
        """One episode, from its lease to its blob."""
        context, recipe = self.context, self.context.recipe
        task = within_context(self.tasks.task(attempt.task_id), recipe)
        if task.environment not in self.environments:
            raise UsageError(f"task {task.id} wants environment {task.environment!r}: name it in the recipe")
        demonstrated = attempt.stage == "sft"
        renderer = CompactRenderer(self.tokenizer)
        with context.events.span("episode", ids=_ids(attempt)) as numbers:
            episode = await run_episode(
                task,
                attempt=attempt,
                environment=self.environments[task.environment](),
                renderer=renderer,
                engine=self._demonstrator(task, attempt, renderer) if demonstrated else self.engine,
                sampling=sampling_of(recipe),
                engine_name="demonstrator" if demonstrated else "fleet",
                sandbox_tier=self.tier.tier if task.layer is not None else "none",
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
            get_record(self.tasks.blobs, task.repository, Tree),
            self.vault.verifier(task.id),
            gold_probability=self.context.recipe.demonstrations.gold_probability,
            seed=attempt.seed,
        )
        return ScriptedEngine(spoken(policy, renderer))


async def open_rollouts(context: Context, engine: Engine) -> Rollouts:
    """Refuses to start where a sandbox does not hold, and takes away what a killed predecessor left."""
    tasks = load(context.tasks)
    tier = open_tier(context.recipe.rollouts.tier, f"{context.info.run_id}-{context.who}")
    num_reaped = tier.reap()
    context.events.write("reap", numbers={"removed": num_reaped})
    if tier.tier != "local":
        probes = await selftest(tier, next(iter(tasks.layers.values()), None))
        failed = [probe for probe in probes if not probe.held]
        if failed:
            raise SandboxUnavailable(
                f"the sandbox does not hold: {failed[0].name}: {failed[0].detail} (tidemill doctor --sandbox)"
            )
    vault = FolderVault(context.tasks / "vault")
    tokenizer = context.tokenizer()
    # Nothing is kept from one attempt to the next: each is played in a sandbox of its own and graded in a fresh one.
    grader = Grader(tier, vault, tasks.blobs, tasks.layers, num_kept=0)

    def mend() -> Environment:
        return MendEnvironment(tier, blobs=tasks.blobs, layers=tasks.layers, grader=grader)

    return Rollouts(
        context=context,
        tasks=tasks,
        vault=vault,
        tier=tier,
        engine=engine,
        tokenizer=tokenizer,
        environments={"mend": mend, **context.recipe.environments},
    )


def within_context(task: Task, recipe: Recipe) -> Task:
    """The task, with no longer a context than the recipe's policy has."""
    longest = min(task.limits.max_context_tokens, recipe.policy.max_context_tokens)
    return msgspec.structs.replace(task, limits=msgspec.structs.replace(task.limits, max_context_tokens=longest))


def sampling_of(recipe: Recipe) -> Sampling:
    """How the policy is sampled in training, in evaluation and in service."""
    return Sampling(temperature=recipe.rl.temperature, top_p=1.0, top_k=0)


def open_tier(name: str, label: str) -> SandboxTier:
    if name == "local":
        return LocalTier(label, i_know_this_is_not_a_sandbox=True)
    return NamespacesTier(label)


def _ids(attempt: Attempt) -> dict[str, str]:
    return {"attempt": attempt.id, "group": attempt.group_id, "task": attempt.task_id, "stage": attempt.stage}
