"""What the guessing agents' figures are worked out from: their own guesses, and as many tries as they have."""

from pathlib import Path
from types import ModuleType

import pytest

from support.benchmarks import benchmark
from support.mend_task import mend_task_set, mend_world
from tidemill.core.records import ToolCall
from tidemill.episodes.demonstrations import Demonstrator
from tidemill.episodes.syntax import syntax_error
from tidemill.run.evaluation.players import guesses
from tidemill.sandboxes.layers import installed_layer
from tidemill.tasks.folder import load


@pytest.fixture(scope="module")
def chance() -> ModuleType:
    return benchmark("chance")


@pytest.mark.parametrize("max_steps", range(2, 14))
def test_tries_are_counted_as_the_agents_make_them(chance: ModuleType, max_steps: int) -> None:
    world = mend_world(layer=installed_layer(["pytest"]), max_steps=max_steps)
    agent = Demonstrator(world.task, world.repository, None, gold_probability=0.0, seed=1)
    calls: list[ToolCall] = [agent.act("failed") for _ in range(max_steps)]
    assert [call.name for call in calls].count("test") == chance.num_tries(max_steps)


def test_the_chance_is_that_of_the_agents_guesses(
    chance: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = load(mend_task_set(tmp_path / "set"))
    chance.report(tasks, 20)
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    (task,) = tasks.tasks
    (source,) = [file.data.decode() for file in tasks.workspace(task).files if file.path == task.data["path"]]
    for agent in ("inverse", "blind"):
        num = sum(syntax_error(guess) is None for guess in guesses(agent, source, 4, 10))
        assert lines[agent].startswith(f"chance {4 / num:.4f}; {num} to {num}, median {num} valid guesses"), agent
    assert len(guesses("inverse", source, 4, 10)) < len(guesses("blind", source, 4, 10))
