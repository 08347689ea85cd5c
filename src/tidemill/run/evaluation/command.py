"""`tidemill eval`: which tasks, who plays them, and the tables that come of it."""

import argparse
import asyncio
import hashlib
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tidemill.core.errors import UsageError
from tidemill.core.records import Episode, digest
from tidemill.core.seams import SandboxTier
from tidemill.reports.comparison import (
    BEHAVIOURS,
    REPAIRS,
    compare,
    comparison_table,
    figures_table,
    solving,
)
from tidemill.reports.evaluation import EvalRow, by_key, read_rows, summarize, table, without_faults
from tidemill.run.evaluation.examinees import Examinee, examinee, run_and_version
from tidemill.run.evaluation.results import Results, open_results
from tidemill.run.evaluation.rows import played, row_of
from tidemill.run.services.context import tasks_folder
from tidemill.run.services.curriculum import chosen
from tidemill.run.services.rollouts import open_tier
from tidemill.run.workshop import Workshop, workshop_over
from tidemill.tasks.commands import unpack
from tidemill.tasks.folder import TaskSet, load

TELL_EVERY_S = 10.0
LABEL = "eval"
"""Of its sandboxes."""


def eval_command(arguments: argparse.Namespace) -> int:
    _check(arguments)
    try:
        name, path, rows = asyncio.run(_evaluate(arguments))
    except BaseExceptionGroup as group:
        raise _first(group) from None
    print("\n".join(_tables(name, path, rows, arguments.against)))
    faults = [row for row in rows if row.outcome == "env_fault"]
    if faults:
        print(
            f"{len(faults)} of {len(rows)} attempts failed through no fault of the agent, and count nowhere "
            f"(the first: {faults[0].task_id}): the same command tries them again",
            file=sys.stderr,
        )
    return 1 if faults else 0


def _check(arguments: argparse.Namespace) -> None:
    named = [name for name in ("endpoint", "agent", "checkpoint") if getattr(arguments, name) is not None]
    if len(named) != 1:
        raise UsageError(f"{len(named)} of --endpoint, --agent and --checkpoint: give one of them")
    for name in ("num", "samples", "slots", "max_window_lines", "max_sampled_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}: give 1 or more")
    if arguments.temperature is not None and not arguments.temperature >= 0:
        raise UsageError(f"--temperature is {arguments.temperature}: give 0 (greedy) or more")
    if arguments.temperature == 0 and arguments.samples > 1:
        raise UsageError(f"--samples is {arguments.samples}: --temperature 0 gives the same attempt again, leave it 1")
    if arguments.checkpoint is None and arguments.tasks is None:
        raise UsageError("--tasks is missing: give a task manifest (.json) or a task set folder")
    if arguments.against is not None and not Path(arguments.against).is_file():
        raise UsageError(f"--against {arguments.against} is no file: give the --out of an earlier evaluation")


async def _evaluate(arguments: argparse.Namespace) -> tuple[str, Path, list[EvalRow]]:
    """Who was examined, the file, and its rows of the wanted tasks and samples."""
    async with examinee(arguments) as who, _tier(arguments) as tier, _task_set(arguments, tier) as tasks:
        lines = arguments.max_window_lines or who.max_window_lines
        seed = who.seed if arguments.seed is None else arguments.seed
        names = chosen(tasks.tasks, arguments.split, max_window_lines=lines, seed=seed, purpose="evaluation")
        if not names:
            raise UsageError(
                f"no {arguments.split} task of {tasks.folder} is short enough for --max-window-lines {lines}: "
                "raise it, or give another --split"
            )
        workshop = workshop_over(tasks, tier, who.environments, keeps_verdicts=True)
        about = {
            **who.about,
            **workshop.rules([tasks.task(name) for name in names], who.renderer),
            "agent": who.name,
            "split": arguments.split,
            "seed": seed,
            "max_window_lines": lines,
            "tasks": _digest(tasks, arguments.split),
        }
        names = names[: arguments.num]
        path = Path(arguments.out) if arguments.out else _default_out(who, arguments)
        with open_results(path, about) as results:
            known = results.known()
            wanted = [(name, n) for n in range(arguments.samples) for name in names if (name, n) not in known]
            if wanted:
                await _play(arguments, who, workshop, results, wanted=wanted, seed=seed)
            inside = set(names)
            rows = [row for row in results.rows() if row.task_id in inside and row.sample < arguments.samples]
    return who.name, path, rows


async def _play(
    arguments: argparse.Namespace,
    who: Examinee,
    workshop: Workshop,
    results: Results,
    *,
    wanted: Sequence[tuple[str, int]],
    seed: int,
) -> None:
    slots, progress = asyncio.Semaphore(arguments.slots), _Progress(len(wanted))
    player = who.player(workshop.tasks)
    workshop.tier.reap()
    await workshop.try_sandbox()

    async def one(task_id: str, sample: int) -> None:
        async with slots:
            attempt, episode = await played(
                lambda attempt: player.play(workshop, attempt), player.version, task_id, sample, seed=seed
            )
        task = workshop.tasks.task(task_id)
        results.add(row_of(task, attempt, episode, results.keep(episode), version=player.version, sample=sample))
        progress.tell(episode)

    print(f"{who.name}: {len(wanted)} attempts at {arguments.split} tasks, into {results.path}", flush=True)
    async with asyncio.TaskGroup() as group:
        for task_id, sample in wanted:
            group.create_task(one(task_id, sample))


@asynccontextmanager
async def _tier(arguments: argparse.Namespace) -> AsyncIterator[SandboxTier]:
    tier = open_tier(arguments.tier, LABEL)
    try:
        yield tier
    finally:
        await tier.close()


@asynccontextmanager
async def _task_set(arguments: argparse.Namespace, tier: SandboxTier) -> AsyncIterator[TaskSet]:
    """The one that is named, made for the occasion where it is a manifest; else that of the checkpoint's run."""
    if arguments.tasks is None:
        yield load(tasks_folder(run_and_version(arguments.checkpoint)[0]))
    elif (path := Path(arguments.tasks)).suffix != ".json":
        yield load(path)
    else:
        with tempfile.TemporaryDirectory(prefix="tidemill-tasks-") as aside:
            await unpack(path, Path(aside, "set"), tier)
            yield load(Path(aside, "set"))


class _Progress:
    def __init__(self, num: int) -> None:
        self.num, self.num_done, self.num_solved, self.num_faults = num, 0, 0, 0
        self.told_s = time.monotonic()

    def tell(self, episode: Episode) -> None:
        self.num_done += 1
        self.num_solved += episode.measures.get("solved", 0.0) == 1.0
        self.num_faults += episode.outcome == "env_fault"
        if time.monotonic() - self.told_s > TELL_EVERY_S:
            self.told_s = time.monotonic()
            faults = f", {self.num_faults} faults" if self.num_faults else ""
            print(f"  {self.num_done} of {self.num} attempts, {self.num_solved} solved{faults}", flush=True)


def _tables(name: str, path: Path, rows: Sequence[EvalRow], against: str | None) -> list[str]:
    """Lines to print; none of figures where nothing but faults came of it."""
    if not without_faults(rows):
        return []
    lines = table({name: summarize(rows)}, "agent")
    packages = by_key(sorted(rows, key=lambda row: row.package), lambda row: row.package)
    if len(packages) > 1:
        lines += ["", *table(packages, "package")]
    measures = (*solving(rows), *REPAIRS, *BEHAVIOURS)
    lines += ["", *figures_table(rows, measures, "per attempt")]
    if against is not None:
        other = read_rows(Path(against))
        names = {measure.name for measure in (*solving(other), *REPAIRS, *BEHAVIOURS)}
        both = [measure for measure in measures if measure.name in names]
        lines += ["", *comparison_table(compare(other, rows, both), Path(against).stem, name)]
    return [*lines, "", f"rows: {path}"]


def _default_out(who: Examinee, arguments: argparse.Namespace) -> Path:
    parts = [who.name, arguments.split]
    if "temperature" in who.about:
        parts.append(f"t{who.about['temperature']:g}")
    return Path("evals", re.sub(r"[^\w@.-]+", "-", "-".join(parts)) + ".jsonl")


def _digest(tasks: TaskSet, split: str) -> str:
    names = sorted(digest(task) for task in tasks.tasks if task.split == split)
    return hashlib.sha256("".join(names).encode()).hexdigest()[:16]


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
