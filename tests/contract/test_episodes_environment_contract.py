"""One suite over environments: the built-in one over a sandbox tier, and the one that users are shown."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import pytest

from support.episode_parts import echo_task, recipe
from support.mend_task import mend_world
from tidemill.core.records import Task, ToolCall
from tidemill.core.seams import Environment, SandboxTier, ToolSpec
from tidemill.episodes.grading import Grader
from tidemill.episodes.mend import MendEnvironment
from tidemill.sandboxes.layers import installed_layer
from tidemill.sandboxes.local import LocalTier


@dataclass
class Case:
    make: Callable[[], Environment]
    task: Task
    right: list[ToolCall]
    """Calls that solve the task; the last one ends the episode."""
    tier: SandboxTier | None = None


def call(name: str, **arguments: str | int) -> ToolCall:
    return ToolCall(id="c", name=name, arguments=arguments)


def guess_number() -> Case:
    task = msgspec.structs.replace(echo_task(), data={"number": 6, "highest": 10})
    return Case(make=recipe("guess_number").GuessNumber, task=task, right=[call("guess", number=6)])


def mend() -> Case:
    world = mend_world(layer=installed_layer(["pytest"]), failure="failed")
    tier = LocalTier("test-contract", i_know_this_is_not_a_sandbox=True)
    grader = Grader(tier, world, world.blobs, world.layers)
    return Case(
        make=lambda: MendEnvironment(tier, blobs=world.blobs, layers=world.layers, grader=grader),
        task=world.task,
        right=[call("edit", line=3, old=">", new="<"), call("submit")],
        tier=tier,
    )


@contextmanager
def running(case: Case) -> Iterator[Callable[[Callable[[Environment], Awaitable[None]]], None]]:
    def run(test: Callable[[Environment], Awaitable[None]]) -> None:
        async def main() -> None:
            environment = case.make()
            try:
                await asyncio.wait_for(test(environment), 30.0)
            finally:
                await environment.close()
                if case.tier is not None:
                    await case.tier.close()

        asyncio.run(main())

    yield run


@pytest.fixture(params=[guess_number, mend])
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.param()
    return made


def value(tool: ToolSpec, name: str) -> str | int:
    return 3 if tool.parameters[name] == "integer" else "x"


def test_tools_are_named_once_and_ask_for_what_they_have(case: Case) -> None:
    environment = case.make()
    names = [tool.name for tool in environment.tools]
    assert len(set(names)) == len(names) > 0
    assert environment.reward_version
    for tool in environment.tools:
        assert tool.description
        assert set(tool.required) <= set(tool.parameters)
        assert list(tool.required) == list(tool.parameters)[: len(tool.required)], "optional ones come last"


def test_every_tool_answers_any_well_formed_call(case: Case) -> None:
    async def test(environment: Environment) -> None:
        assert case.task.statement in await environment.open(case.task)
        for tool in environment.tools:
            for names in (tool.required, tuple(tool.parameters)):
                feedback = await environment.call(call(tool.name, **{name: value(tool, name) for name in names}))
                assert isinstance(feedback.text, str)
                assert feedback.ends in (None, "submitted", "flagged_impossible")

    with running(case) as run:
        run(test)


def test_the_right_calls_end_it_and_are_worth_more_than_none(case: Case) -> None:
    async def nothing(environment: Environment) -> None:
        await environment.open(case.task)
        score = await environment.score("step_limit")
        assert score.measures["solved"] == 0.0
        sums.append(sum(score.rewards.values()))

    async def right(environment: Environment) -> None:
        await environment.open(case.task)
        for number, item in enumerate(case.right):
            feedback = await environment.call(item)
            assert (feedback.ends is not None) == (number == len(case.right) - 1)
        score = await environment.score("submitted")
        assert score.measures["solved"] == 1.0
        sums.append(sum(score.rewards.values()))

    sums: list[float] = []
    with running(case) as run:
        run(nothing)
        run(right)
    assert sums[1] > sums[0]


def test_closing_twice_and_closing_what_was_never_opened_is_fine(case: Case) -> None:
    async def test(environment: Environment) -> None:
        await environment.close()

    with running(case) as run:
        run(test)
