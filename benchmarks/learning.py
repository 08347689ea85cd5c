"""Asks whether a policy learns to mend code that it has never seen: three tables, from a finished run and its controls.

`python benchmarks/learning.py RUN [--out DIR] [--samples 8] [--num N] [--tables-only] …`

    before, after   versions 0 and the last of RUN, on held-out tasks: sampled, and greedy
    sft             RUN's version 0, and the CPU seconds of RL spent on more demonstrations
    shuffled        RUN's version 0, and RL of the same length with rewards shuffled across groups
    blind, inverse  scripted agents that guess, with the policy's number of turns

Each evaluation is a file in DIR that goes on where it was killed, each control a run in DIR that is resumed. What is
there is used: with `--tables-only` nothing is run.

It has been run from end to end on a tiny recipe alone, to see that it works: none of its figures is quoted anywhere,
and what a run of the demo's size shows in it, or costs, is not known.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.core.records import Episode
from tidemill.reports.comparison import (
    BEHAVIOURS,
    REPAIRS,
    Measure,
    by_package,
    compare,
    comparison_table,
    figure,
    num_samples,
    solved_in,
    solving,
)
from tidemill.reports.evaluation import EvalRow, columns, read_rows
from tidemill.reports.rundata import RunData
from tidemill.run.config import Recipe
from tidemill.run.evaluation.results import read_about
from tidemill.run.folder import RunFolder
from tidemill.run.services.context import overrides_file, recipe_file, saved_recipe, tasks_folder

ROLLOUTS_AND_LEARNER = ("coordinator", "worker", "engine", "learner")
CONTROLS = ("sft", "shuffled")
AGENTS = ("blind", "inverse")
NAMES = {
    "before": "version 0",
    "after": "after RL",
    "sft": "more SFT instead",
    "shuffled": "RL, rewards shuffled",
    "blind": "blind agent",
    "inverse": "inverse agent",
}
Rows = Mapping[str, list[EvalRow]]
"""Name of an evaluation (`before`, `before-greedy`, …) → its rows."""


# --- what RL cost, and what that buys of SFT -----------------------------------------------------------------


def cpu_seconds(data: RunData, from_s: float, to_s: float, services: Sequence[str] = ROLLOUTS_AND_LEARNER) -> float:
    """CPU seconds of services (by kind) and all that descends from them, by the samples of a run; Unix times."""
    total = 0.0
    last: dict[str, tuple[float, int]] = {}
    for sample in data.samples:
        who, used_s = sample["who"], sample["ticks"] / sample["ticks_per_s"]
        if who.rpartition("-")[0] in services:
            before_s, before_pid = last.get(who, (0.0, sample["pid"]))
            if from_s <= sample["at_s"] <= to_s:
                total += max(0.0, used_s - before_s) if before_pid == sample["pid"] else used_s
            last[who] = used_s, sample["pid"]
    return total


def rl_cpu_seconds(data: RunData) -> float:
    """Of the learner and of all rollouts, from the publication of version 0 to that of the newest version."""
    return cpu_seconds(data, data.versions[0], data.versions[data.head])


@dataclass(frozen=True)
class SftBudget:
    num_episodes: int
    num_steps: int
    cpu_s: float
    """That it is meant to cost."""


def sft_budget(data: RunData, recipe: Recipe, cpu_s: float) -> SftBudget:
    """As many steps and fresh demonstrations, in the proportion of the run's own, as `cpu_s` pays for at its prices."""
    shown = recipe.demonstrations
    if not shown.num_steps:
        raise SystemExit(f"{data.folder} had no demonstrations to price SFT by: give --sft-steps and --sft-episodes")
    spans = [event for event in data.events if event.what == "imitate" and not event.note]
    step_s = sum(cpu_seconds(data, span.from_s, span.to_s, ("learner",)) for span in spans) / shown.num_steps
    if step_s <= 0:  # too short for a sample a second
        walls = [float(row["wall_s"]) for row in data.metrics if row.get("stage") == "sft"]
        step_s = sum(walls) / shown.num_steps
    names = {group.id for group in data.journal.groups if group.stage == "sft"}
    played = [row.episode for row in data.journal.attempts if row.group_id in names and row.episode]
    episodes = [episode for name in played if isinstance(episode := data.episode(name), Episode)]
    episode_s = sum(sum(episode.cpu_s.values()) for episode in episodes) / max(len(episodes), 1)
    per_step = shown.num_episodes / shown.num_steps
    num_steps = max(1, round(cpu_s / (step_s + episode_s * per_step)))
    num_episodes = max(1, round(num_steps * per_step))
    return SftBudget(num_episodes, num_steps, num_steps * step_s + num_episodes * episode_s)


# --- runs and evaluations ------------------------------------------------------------------------------------


def tidemill(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "tidemill.run.cli", *map(str, arguments)]
    print("$ tidemill", *arguments, flush=True)
    if subprocess.run(command, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode:
        raise SystemExit(f"this failed, and the same command goes on: tidemill {' '.join(map(str, arguments))}")


def run_control(name: str, base: RunFolder, out: Path, own: Sequence[str]) -> None:
    """A run from `base`'s version 0, by its recipe but for `own`; nothing where it is finished."""
    none = ["--pretraining.num-steps", "0", "--pretraining.num-copying-steps", "0"]
    quick = ["--evaluation.every", "1000000", "--evaluation.num-tasks", "1", "--num-validated-tasks", "0"]
    start = ["--tasks", str(tasks_folder(base)), "--start-from", str(base.path)]
    overrides = json.loads(overrides_file(base).read_text())
    tidemill("run", recipe_file(base), "--out", out / name, *overrides, *start, *none, *quick, *own)


def evaluate(arguments: argparse.Namespace, out: Path, name: str, who: Sequence[str | Path], seed: int) -> None:
    """Sampled, and greedy where there is a policy."""
    options = ["--split", arguments.split, "--seed", str(seed), "--slots", str(arguments.slots)]
    options += [] if arguments.num is None else ["--num", str(arguments.num)]
    tidemill("eval", *who, *options, "--samples", str(arguments.samples), "--out", out / f"{name}.jsonl")
    if "--checkpoint" in who:
        tidemill("eval", *who, *options, "--temperature", "0", "--out", out / f"{name}-greedy.jsonl")


def run_all(arguments: argparse.Namespace, out: Path) -> None:
    base = RunFolder(arguments.run)
    data, recipe = RunData(base.path), saved_recipe(base)
    seed = recipe.seed
    out.mkdir(parents=True, exist_ok=True)
    evaluate(arguments, out, "before", ["--checkpoint", f"{base.path}@0"], seed)
    evaluate(arguments, out, "after", ["--checkpoint", f"{base.path}@{data.head}"], seed)
    lines = ["--tasks", str(tasks_folder(base)), "--max-window-lines", str(recipe.max_window_lines)]
    for agent in AGENTS:
        if agent not in arguments.skip:
            evaluate(arguments, out, agent, ["--agent", agent, *lines], seed)
    if "sft" not in arguments.skip:
        budget = SftBudget(arguments.sft_episodes or 0, arguments.sft_steps or 0, 0.0)
        if not (budget.num_episodes and budget.num_steps):
            budget = sft_budget(data, recipe, rl_cpu_seconds(data))
        shown = ["--demonstrations.num-episodes", str(budget.num_episodes)]
        shown += ["--demonstrations.num-steps", str(budget.num_steps), "--rl.num-updates", "0"]
        run_control("sft", base, out, [*shown, "--seed", str(seed + 1)])  # other demonstrations than it has seen
        evaluate(arguments, out, "sft", ["--checkpoint", out / "sft"], seed)
    if "shuffled" not in arguments.skip:
        shown = ["--demonstrations.num-episodes", "0", "--demonstrations.num-steps", "0", "--rl.shuffled-rewards"]
        run_control("shuffled", base, out, shown)
        evaluate(arguments, out, "shuffled", ["--checkpoint", out / "shuffled"], seed)


# --- tables --------------------------------------------------------------------------------------------------


def read_all(out: Path) -> dict[str, list[EvalRow]]:
    return {path.stem: read_rows(path) for path in sorted(out.glob("*.jsonl"))}


def greedy(measure: Measure) -> Measure:
    return measure._replace(name=f"{measure.name}, greedy")


def before_and_after(rows: Rows) -> list[str]:
    """(a) Before and after RL, all measures; then by package."""
    old, new = rows["before"], rows["after"]
    found = compare(old, new, (*min(solving(old), solving(new), key=len), *REPAIRS))
    if {"before-greedy", "after-greedy"} <= rows.keys():
        sides = rows["before-greedy"], rows["after-greedy"]
        found += compare(*sides, [greedy(solved_in(1)), *map(greedy, REPAIRS)])
    lines = comparison_table(found, NAMES["before"], NAMES["after"])
    return [*lines, "", "pass@1 by package", *comparison_table(by_package(old, new), NAMES["before"], NAMES["after"])]


def against_baselines(rows: Rows, cpu_s: Mapping[str, float]) -> list[str]:
    """(b) All of them side by side, then what RL has over each, paired by task."""
    names = [name for name in NAMES if name in rows]
    most = min(num_samples(rows[name]) for name in names)
    measures = (solved_in(1), *([solved_in(most)] if most > 1 else []), *REPAIRS[:2])
    cells = [["", "tasks", *(measure.name for measure in measures), greedy(solved_in(1)).name, "CPU-s after version 0"]]
    for name in names:
        figures = [_told(rows[name], measure) for measure in measures]
        spent = f"{cpu_s[name]:.0f}" if name in cpu_s else "–"
        tasks = str(len({row.task_id for row in rows[name]}))
        cells.append([NAMES[name], tasks, *figures, _told(rows.get(f"{name}-greedy", []), solved_in(1)), spent])
    found = {}
    for name in names:
        if name != "after":
            found[f"pass@1 against {NAMES[name]}"] = compare(rows[name], rows["after"], [solved_in(1)])[0]
        if name != "after" and {f"{name}-greedy", "after-greedy"} <= rows.keys():
            sides = rows[f"{name}-greedy"], rows["after-greedy"]
            found[f"pass@1, greedy, against {NAMES[name]}"] = compare(*sides, [solved_in(1)])[0]
    return [*columns(cells), "", *comparison_table(found, "baseline", NAMES["after"])]


def behaviours(rows: Rows) -> list[str]:
    """(c) What it does on its way, before and after RL."""
    return comparison_table(compare(rows["before"], rows["after"], BEHAVIOURS), NAMES["before"], NAMES["after"])


def _told(rows: Sequence[EvalRow], measure: Measure) -> str:
    found = figure(rows, measure)
    return "–" if found is None else f"{found.value:.3f} ({found.low:.3f}–{found.high:.3f})"


def spent(base: Path, out: Path) -> dict[str, float]:
    """CPU seconds behind version 0: of RL, or of what came in its place. A control's start-up counts, RL's does not."""
    found = {"before": 0.0}
    for name, folder in (("after", base), *((name, out / name) for name in CONTROLS)):
        if (folder / "journal.sqlite").exists():
            data = RunData(folder)
            found[name] = rl_cpu_seconds(data) if data.head else cpu_seconds(data, 0.0, data.versions.get(0, 0.0))
    return found


def tables(base: Path, out: Path) -> list[str]:
    rows = read_all(out)
    missing = [name for name in ("before", "after") if not rows.get(name)]
    if missing:
        raise SystemExit(f"{out} holds no {missing[0]}.jsonl: leave out --tables-only")
    split = read_about(out / "before.jsonl").get("split", "unknown")
    return [
        f"{base}, split {split}; {time.strftime('%d %B %Y')}; {os.cpu_count()} cores, {platform.machine()}",
        "intervals: 95 %, bootstrap over tasks, paired; p: two-sided sign-flip permutation over tasks",
        *["", "(a) before and after RL", *before_and_after(rows)],
        *["", "(b) against baselines", *against_baselines(rows, spent(base, out))],
        *["", "(c) behaviour, per attempt", *behaviours(rows)],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The tables that a claim of learning has to bring.")
    parser.add_argument("run", type=Path, help="a finished run")
    parser.add_argument("--out", type=Path, help="where evaluations and controls lie (default: RUN-learning)")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--num", type=int, help="so many tasks (default: all of the split)")
    parser.add_argument("--split", default="heldout", choices=("dev", "heldout"))
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--skip", nargs="*", default=[], choices=(*CONTROLS, *AGENTS))
    parser.add_argument("--sft-steps", type=int, help="in place of what RL's CPU seconds buy")
    parser.add_argument("--sft-episodes", type=int)
    parser.add_argument("--tables-only", action="store_true", help="run nothing: print what is there")
    arguments = parser.parse_args()
    arguments.run = arguments.run.resolve()
    out = arguments.out or arguments.run.with_name(f"{arguments.run.name}-learning")
    if not arguments.tables_only:
        run_all(arguments, out.resolve())
    print("\n".join(tables(arguments.run, out)))


if __name__ == "__main__":
    main()
