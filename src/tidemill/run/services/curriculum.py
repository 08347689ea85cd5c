"""Which tasks a run takes, and in which order: drawn from the recipe's seed, so that a resumed run agrees."""

import random
from collections.abc import Iterable

from tidemill.core.records import Split, Task
from tidemill.run.config import Recipe


def chosen(tasks: Iterable[Task], split: Split, *, max_window_lines: int | None, seed: int, purpose: str) -> list[str]:
    """All tasks of a split that are short enough (None: all), in the order in which they are taken for a purpose."""
    names = sorted(
        task.id
        for task in tasks
        if task.split == split and (max_window_lines is None or _num_lines(task) <= max_window_lines)
    )
    random.Random(f"{seed}/{purpose}").shuffle(names)
    return names


def _shuffled(tasks: Iterable[Task], split: Split, recipe: Recipe, purpose: str) -> list[str]:
    return chosen(tasks, split, max_window_lines=recipe.max_window_lines, seed=recipe.seed, purpose=purpose)


def _num_lines(task: Task) -> int:
    """Of the window that the task opens on; 0 where it has none."""
    if "last_line" not in task.data:
        return 0
    return int(str(task.data["last_line"])) - int(str(task.data["first_line"])) + 1


def demonstration_tasks(tasks: Iterable[Task], recipe: Recipe) -> list[str]:
    """One demonstration each; begun again from the front where there are fewer tasks than demonstrations."""
    names = _shuffled(tasks, "train", recipe, "demonstrations")
    num = recipe.demonstrations.num_episodes
    return (names * (num // max(len(names), 1) + 1))[:num]


def rl_tasks(tasks: Iterable[Task], recipe: Recipe) -> list[str]:
    """Every training task once per epoch."""
    return _shuffled(tasks, "train", recipe, "rl")


def evaluation_tasks(tasks: Iterable[Task], recipe: Recipe) -> list[str]:
    """The same tasks at every version."""
    return _shuffled(tasks, "heldout", recipe, "evaluation")[: recipe.evaluation.num_tasks]
