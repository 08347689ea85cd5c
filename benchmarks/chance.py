"""What guessing is worth on a task set, worked out without a sandbox: `python benchmarks/chance.py [TASKS] [LINES]`.

For agents that draw valid edits, none twice (`tidemill eval --agent inverse|blind`): how many they choose from, and the
mean chance that the original repair is among their first three. Other repairs that pass as well are not counted, so
what the agents really solve is a little more.
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

from tidemill.episodes.demonstrations import swapped_words
from tidemill.episodes.mend import first_window
from tidemill.episodes.syntax import syntax_error
from tidemill.run.services.curriculum import chosen
from tidemill.tasks.commands import unpack
from tidemill.tasks.folder import TaskSet, load
from tidemill.tasks.inverse import inverses
from tidemill.tasks.vault import FolderVault

ROOT = Path(__file__).parents[1]
NUM_TRIES = 3
"""In eight turns: an edit and a test, then undo, edit and test, twice."""


def report(tasks: TaskSet, max_window_lines: int) -> None:
    vault = FolderVault(tasks.folder / "vault")
    sizes: dict[str, list[int]] = {"inverse": [], "blind": []}
    chances: dict[str, list[float]] = {"inverse": [], "blind": []}
    names = chosen(tasks.tasks, "heldout", max_window_lines=max_window_lines, seed=0, purpose="evaluation")
    for name in names:
        task = tasks.task(name)
        source, gold = (
            next(file.data.decode() for file in tree.files if file.path == task.data["path"])
            for tree in (tasks.workspace(task), vault.verifier(name).gold)
        )
        first, num_lines = first_window(task)
        window = first, first + num_lines - 1
        guesses = {"inverse": inverses(source, *window)}
        guesses["blind"] = list(dict.fromkeys([*guesses["inverse"], *swapped_words(source, *window)]))
        for agent, found in guesses.items():
            valid = [guess for guess in found if syntax_error(guess) is None]
            sizes[agent].append(len(valid))
            chances[agent].append(min(1.0, NUM_TRIES / len(valid)) if gold in valid else 0.0)
    print(f"{len(names)} held-out tasks of at most {max_window_lines} lines")
    for agent, found in chances.items():
        spread = f"{min(sizes[agent])} to {max(sizes[agent])}, median {median(sizes[agent]):.0f}"
        reached = sum(chance > 0 for chance in found)
        print(
            f"{agent:<8} chance {mean(found):.4f}; {spread} valid guesses; the repair is among them in {reached} tasks"
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
