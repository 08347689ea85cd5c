"""`tidemill run`: prepares a run folder, starts its services, tells how it goes."""

import argparse
import asyncio
import json
import shutil
import sys
import time
from pathlib import Path

from tidemill.batches.disk import refuse_network_disk
from tidemill.core.errors import UsageError
from tidemill.core.files import write_whole
from tidemill.run.config import Recipe, load_recipe, recipe_digest, resolved
from tidemill.run.display import display
from tidemill.run.estimate import estimate_lines
from tidemill.run.folder import RunFolder
from tidemill.run.prepare import prepare
from tidemill.run.progress import Progress
from tidemill.run.services.context import overrides_file, recipe_file, tasks_folder, tokenizer_folder
from tidemill.run.services.curriculum import rl_tasks
from tidemill.run.services.rollouts import open_tier
from tidemill.run.start import find_start
from tidemill.run.supervisor import Service, Supervisor
from tidemill.tasks.folder import load

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
"""One thread per process, but where a stage asks for more; waiting threads must not spin on cores that others need."""


def run_command(arguments: argparse.Namespace) -> int:
    path = Path(arguments.recipe)
    recipe = load_recipe(path, arguments.overrides)
    if arguments.dry_run:
        print(json.dumps(resolved(recipe), indent=2))
        print("\n".join(estimate_lines(recipe)))
        return 0
    folder = RunFolder(Path(arguments.out or f"runs/{recipe.name}"))
    if not arguments.overrides and overrides_file(folder).exists():  # of the run that is resumed
        arguments.overrides = json.loads(overrides_file(folder).read_text())
        recipe = load_recipe(path, arguments.overrides)
    refuse_network_disk(folder.journal)
    with folder.lock():
        return train(folder, recipe, path, arguments.overrides, plain=arguments.plain)


def train(folder: RunFolder, recipe: Recipe, path: Path, overrides: list[str], *, plain: bool = True) -> int:
    """From a locked folder to the run's end. Returns the exit code."""
    started_s = time.time()
    source = path.resolve().parent / recipe.tasks
    if not source.exists() and not tasks_folder(folder).exists():
        raise UsageError(f"the recipe's tasks are not at {source}: give a task manifest or a task set folder")
    start = None
    if recipe.start_from is not None and not tokenizer_folder(folder).exists():  # else all that it names is copied
        start = find_start(recipe.start_from, path.resolve().parent)
    info = folder.prepare(recipe=recipe_digest(recipe), recipe_name=recipe.name)
    if not overrides_file(folder).exists():
        shutil.copyfile(path, recipe_file(folder))
        write_whole(overrides_file(folder), json.dumps(overrides).encode())
    say = Progress(folder, recipe, started_s)
    say(f"run {info.run_id} in {folder.path}")
    asyncio.run(_prepare(folder, recipe, source=source, start=start, say=say, label=f"{info.run_id}-prepare"))
    tasks = load(tasks_folder(folder)).tasks
    if not rl_tasks(tasks, recipe):
        raise UsageError(f"no training task has at most max_window_lines {recipe.max_window_lines} lines: raise it")
    with display(folder, recipe, say, plain=plain) as tick:
        end = Supervisor(folder, services(folder, recipe), on_tick=tick).run()
    minutes = (time.time() - started_s) / 60
    if end == "stopped":
        say(f"stopped after {minutes:.1f} minutes; the same command goes on from here")
        return 130
    say(f"done in {minutes:.1f} minutes; next: tidemill audit {folder.path}")
    return 0


async def _prepare(
    folder: RunFolder, recipe: Recipe, *, source: Path, start: Path | None, say: Progress, label: str
) -> None:
    tier = open_tier(recipe.rollouts.tier, label)
    tier.reap()
    try:
        await prepare(folder, recipe, tier, source=source, start=start, say=say)
    finally:
        await tier.close()


def services(folder: RunFolder, recipe: Recipe) -> list[Service]:
    """The processes of a run, in the order in which they start."""
    whos = [
        "coordinator-0",
        *(f"engine-{index}" for index in range(recipe.rollouts.num_engines)),
        *(f"worker-{index}" for index in range(recipe.rollouts.num_workers)),
        "learner-0",
        "evaluator-0",
    ]
    listening = [who for who in whos if who.startswith(("coordinator", "engine"))]
    ports = folder.choose_ports(listening)
    return [
        Service(
            who=who,
            argv=[sys.executable, "-m", "tidemill.run.services", str(folder.path), who, json.dumps(ports)],
            env=ENVIRONMENT,
            port=ports.get(who),
            ends_run=who in ("learner-0", "evaluator-0"),
        )
        for who in whos
    ]
