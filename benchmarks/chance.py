"""What two agents' guessing is worth on a task set, worked out without a sandbox: `python benchmarks/chance.py [TASKS]
[LINES]`.

For the agents that draw valid edits uniformly, none twice (`tidemill eval --agent inverse|blind`): how many they choose
from, and the mean chance that the original repair is among the first that their turns allow. Other repairs that pass
as well are not counted, so what the agents really solve is a little more.

It is the figure of these two agents, and no bound on guessing. They take each guess back before the next one: guesses
on one line can replace each other in one edit, which leaves turns for more of them. They draw uniformly: faults were
not planted so, and who knows how often each operator was used draws better.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

from tidemill.episodes.demonstrations import TRY_STEPS
from tidemill.episodes.mend import first_window
from tidemill.episodes.syntax import syntax_error
from tidemill.run.evaluation.players import Agent, guesses
from tidemill.run.services.curriculum import chosen
from tidemill.tasks.commands import unpack
from tidemill.tasks.folder import TaskSet, load
from tidemill.tasks.vault import FolderVault

ROOT = Path(__file__).parents[1]
AGENTS: tuple[Agent, ...] = ("inverse", "blind")


def num_tries(max_steps: int) -> int:
    """An edit and a test, then undo, edit and test again and again: three in eight turns."""
    return (max_steps + 1) // TRY_STEPS


def report(tasks: TaskSet, max_window_lines: int) -> None:
    vault = FolderVault(tasks.folder / "vault")
    sizes: dict[Agent, list[int]] = {agent: [] for agent in AGENTS}
    chances: dict[Agent, list[float]] = {agent: [] for agent in AGENTS}
    names = chosen(tasks.tasks, "heldout", max_window_lines=max_window_lines, seed=0, purpose="evaluation")
    for name in names:
        task = tasks.task(name)
        source, gold = (
            next(file.data.decode() for file in tree.files if file.path == task.data["path"])
            for tree in (tasks.workspace(task), vault.verifier(name).gold)
        )
        first, num_lines = first_window(task)
        for agent in AGENTS:
            found = guesses(agent, source, first, first + num_lines - 1)
            valid = [guess for guess in found if syntax_error(guess) is None]
            sizes[agent].append(len(valid))
            chance = min(1.0, num_tries(task.limits.max_steps) / max(len(valid), 1))
            chances[agent].append(chance if gold in valid else 0.0)
    print(f"{len(names)} held-out tasks of at most {max_window_lines} lines")
    for agent, each in chances.items():
        spread = f"{min(sizes[agent])} to {max(sizes[agent])}, median {median(sizes[agent]):.0f}"
        reached = sum(chance > 0 for chance in each)
        print(
            f"{agent:<8} chance {mean(each):.4f}; {spread} valid guesses; the repair is among them in {reached} tasks"
        )


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tasksets/mend-v1/manifest.json"
    lines = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    if path.suffix != ".json":
        report(load(path), lines)
        return
    with tempfile.TemporaryDirectory(prefix="tidemill-chance-") as aside:
        asyncio.run(unpack(path, Path(aside, "set"), None))
        report(load(Path(aside, "set")), lines)


if __name__ == "__main__":
    main()
