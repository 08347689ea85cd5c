"""The evaluator's process: a checkpoint under test, with an engine and sandboxes of its own."""

import asyncio

import msgspec

from tidemill.core.errors import SandboxFault
from tidemill.core.files import drop_cut_off_line
from tidemill.core.records import Attempt, Episode
from tidemill.engines.embedded import EmbeddedEngine
from tidemill.reports.evaluation import EvalRow, read_rows
from tidemill.run.evaluation.rows import MAX_TRIES, played, row_of
from tidemill.run.lifeline import lifeline
from tidemill.run.loops import evaluate
from tidemill.run.services.context import Context
from tidemill.run.services.curriculum import evaluation_tasks
from tidemill.run.services.engine import engine_config
from tidemill.run.services.rollouts import Rollouts, open_rollouts


def versions_to_examine(num_updates: int, every: int) -> list[int]:
    """The first, every so many, and the last."""
    return sorted({*range(0, num_updates + 1, every), num_updates})


async def serve(context: Context) -> None:
    recipe = context.recipe
    drop_cut_off_line(context.folder.eval)
    async with lifeline() as died:
        engine = EmbeddedEngine(engine_config(context), on_death=died)
        rollouts = await open_rollouts(context, engine)

        async def examine(version: int) -> None:
            engine.swap(version, context.store.load(version))
            await _examine(context, rollouts, version)

        try:
            await evaluate(
                context.store,
                examine,
                versions=versions_to_examine(recipe.rl.num_updates, recipe.evaluation.every),
                events=context.events,
            )
        finally:
            await rollouts.workshop.tier.close()
            await engine.close()


async def _examine(context: Context, rollouts: Rollouts, version: int) -> None:
    """Every task and sample of the evaluation at one version, but those that are written down already."""
    recipe = context.recipe
    known = {(row.version, row.task_id, row.sample) for row in read_rows(context.folder.eval)}
    slots = asyncio.Semaphore(recipe.rollouts.num_slots)

    async def one(task_id: str, sample: int) -> None:
        async with slots:
            row = await _row(rollouts, version, task_id, sample, seed=recipe.seed)
        with context.folder.eval.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")

    async with asyncio.TaskGroup() as group:
        for task_id in evaluation_tasks(rollouts.workshop.tasks.tasks, recipe):
            for sample in range(recipe.evaluation.num_samples):
                if (version, task_id, sample) not in known:
                    group.create_task(one(task_id, sample))


async def _row(rollouts: Rollouts, version: int, task_id: str, sample: int, *, seed: int) -> EvalRow:
    blob = ""

    async def play(attempt: Attempt) -> Episode:
        nonlocal blob
        episode, result = await rollouts.play(attempt)
        blob = result.episode or ""
        return episode

    attempt, episode = await played(play, version, task_id, sample, seed=seed)
    if episode.outcome == "env_fault":
        causes = [event.detail for event in episode.events if event.what == "fault"]
        raise SandboxFault(
            f"{attempt.id} failed {MAX_TRIES} times, through no fault of the policy: {causes[-1] if causes else '?'}"
        )
    return row_of(rollouts.workshop.tasks.task(task_id), attempt, episode, blob, version=version, sample=sample)
