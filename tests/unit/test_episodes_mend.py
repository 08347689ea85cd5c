"""The tools of the mend environment: windows, edits that are checked, live checks, what an episode is worth."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from support.mend_task import FAULTY, GOLD, PATH, World, mend_world
from tidemill.core.records import Layer, Outcome, ToolCall, digest
from tidemill.core.seams import Feedback, Score
from tidemill.episodes.grading import Grader
from tidemill.episodes.mend import PASSED, MendEnvironment, MendRewards
from tidemill.sandboxes.layers import installed_layer
from tidemill.sandboxes.local import LocalTier

FAILURE = "failed: assert 0 == 1"


class Session:
    """An open environment."""

    def __init__(self, environment: MendEnvironment, text: str) -> None:
        self.environment, self.text = environment, text

    async def do(self, name: str, **arguments: str | int) -> Feedback:
        return await self.environment.call(ToolCall(id="c", name=name, arguments=arguments))


def here(**changes: object) -> World:
    return mend_world(layer=installed_layer(["pytest"]), failure=FAILURE, **changes)  # type: ignore[arg-type]


def within(
    world: World,
    test: Callable[[Session], Awaitable[None]],
    *,
    failures: dict[str, str] | None = None,
    rewards: MendRewards | None = None,
) -> None:
    async def main() -> None:
        tier = LocalTier("test-mend", i_know_this_is_not_a_sandbox=True)
        environment = MendEnvironment(
            tier,
            blobs=world.blobs,
            layers=world.layers,
            grader=Grader(tier, world, world.blobs, world.layers),
            failures=failures,
            rewards=rewards,
            test_cpu_limit_s=1,
        )
        try:
            await test(Session(environment, await environment.open(world.task)))
        finally:
            await environment.close()
            await tier.close()

    asyncio.run(main())


def test_the_first_text_holds_statement_path_window_and_failure() -> None:
    async def test(session: Session) -> None:
        lines = session.text.split("\n")
        assert lines[:3] == ["clamp gives wrong results.", PATH, "1|def clamp(value, low, high):"]
        assert "3|    if value > low:" in lines and "8|" not in session.text
        assert lines[-1] == FAILURE

    within(here(), test)


def test_without_a_recorded_failure_the_shown_checks_are_run() -> None:
    async def test(session: Session) -> None:
        assert session.text.split("\n", 9)[-1].startswith("failed: assert 0 == 1")

    within(mend_world(layer=installed_layer(["pytest"])), test)


def test_an_edit_shows_the_changed_lines_and_changes_the_first_occurrence() -> None:
    async def test(session: Session) -> None:
        told = await session.do("edit", line=3, old="> low", new="< low and\\\n            low")
        assert (told.text, told.error) == ("3|    if value < low and\\\n4|            low:", None)
        assert (await session.do("edit", line=6, old="value", new="low")).text == "6|    if low > high:"
        shown = (await session.do("read")).text
        assert shown.startswith("1|def clamp") and shown.count("\n") == 7, "the window grows with the function"

    within(here(), test)


@pytest.mark.parametrize(
    ("line", "old", "new", "says"),
    [
        (3, ">", "> >", "syntax error: line 3"),
        (3, "", "x", "old is empty"),
        (3, ">", ">", "the same"),
        (3, "absent", "x", "3|    if value > low:"),
        (0, ">", "<", "lines 1 to 7"),
        (8, "a", "b", "lines 1 to 7"),
        (-1, ">", "<", "lines 1 to 7"),
    ],
)
def test_refused_edits_say_why_and_leave_the_file_alone(line: int, old: str, new: str, says: str) -> None:
    async def test(session: Session) -> None:
        before = (await session.do("read")).text
        told = await session.do("edit", line=line, old=old, new=new)
        assert told.error == "refused" and says in told.text
        assert (await session.do("read")).text == before

    within(here(), test)


def test_the_same_edit_twice_is_refused_but_it_may_be_taken_back() -> None:
    async def test(session: Session) -> None:
        assert (await session.do("edit", line=3, old=">", new="<=")).error is None
        assert (await session.do("edit", line=3, old="<=", new=">")).error is None
        again = await session.do("edit", line=3, old=">", new="<=")
        assert again.error == "refused" and "before" in again.text

    within(here(), test)


def test_undo_takes_back_an_edit_with_its_window_and_the_edit_may_be_made_again() -> None:
    async def test(session: Session) -> None:
        assert (await session.do("undo")).error == "refused"
        before = (await session.do("read")).text
        line = before.split("\n")[1].split("|", 1)[1]
        longer = {"line": 2, "old": line, "new": line + "\n" * 9 + "    # more"}
        assert (await session.do("edit", **longer)).error is None
        await session.do("read", start=9)
        assert (await session.do("undo")).error is None
        assert (await session.do("read")).text == before
        spans = session.environment.spans()
        assert spans is not None and spans.lines[2] == line
        assert (await session.do("edit", **longer)).error is None, "what was taken back may be made again"

    within(here(), test)


def test_read_moves_the_window_and_grep_finds_lines_of_the_edited_workspace() -> None:
    async def test(session: Session) -> None:
        assert (await session.do("read", start=13)).text.startswith("1|def span(values):")
        assert (await session.do("edit", line=2, old="max", new="sum")).text == "2|    return sum(values) - min(values)"
        assert (await session.do("read", start=99)).error == "bad_arguments"
        found = (await session.do("grep", pattern="sum(")).text
        assert found == f"{PATH}:14|return sum(values) - min(values)"
        assert "tests/test_shown.py:1|from ranges import clamp" in (await session.do("grep", pattern="clamp")).text
        assert (await session.do("grep", pattern="(((")).text == "nothing found"
        assert (await session.do("grep", pattern="")).error == "bad_arguments"

    within(here(), test)


def test_test_runs_the_shown_checks_on_what_was_edited() -> None:
    async def test(session: Session) -> None:
        failed = (await session.do("test")).text
        assert failed.startswith("failed: assert 0 == 1")
        await session.do("edit", line=7, old="value", new="valu")
        text = (await session.do("test")).text
        assert "NameError" in text and "(at line 7)" in text
        await session.do("edit", line=7, old="valu", new="value")
        await session.do("edit", line=3, old=">", new="<")
        assert (await session.do("test")).text == PASSED

    within(here(), test)


@pytest.mark.parametrize(
    ("new", "says"),
    [
        ("import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "killed"),
        ("while True: pass", "timeout"),
    ],
)
def test_code_that_kills_or_stalls_its_test_fails_it_and_the_next_test_runs(new: str, says: str) -> None:
    async def test(session: Session) -> None:
        await session.do("edit", line=2, old='"""Put a value between two others."""', new=new)
        assert (await session.do("test")).text == f"failed: {says}"
        await session.do("edit", line=2, old=new, new="pass")
        assert (await session.do("test")).text.startswith("failed: assert 0 == 1")

    within(here(), test)


def test_a_workspace_that_was_wrecked_by_a_test_is_replaced() -> None:
    wreck = "import os; os.unlink('ranges.py'); os.mkdir('ranges.py')"

    async def test(session: Session) -> None:
        await session.do("edit", line=2, old='"""Put a value between two others."""', new=wreck)
        await session.do("test")
        await session.do("edit", line=2, old=wreck, new="pass")
        await session.do("edit", line=3, old=">", new="<")
        assert (await session.do("test")).text == PASSED

    within(here(), test)


def test_results_are_shared_between_attempts() -> None:
    results: dict[str, str] = {}

    async def test(session: Session) -> None:
        await session.do("edit", line=3, old=">", new="<")
        assert (await session.do("test")).text == PASSED

    within(here(), test, failures=results)
    (key,) = results
    results[key] = "passed before"

    async def again(session: Session) -> None:
        await session.do("edit", line=3, old=">", new="<")
        assert (await session.do("test")).text == "passed before"

    within(here(), again, failures=results)


def scored(world: World, outcome: Outcome, *edits: tuple[int, str, str], num_tests: int = 0) -> Score:
    scores: list[Score] = []

    async def test(session: Session) -> None:
        for line, old, new in edits:
            await session.do("edit", line=line, old=old, new=new)
            for _ in range(num_tests):
                await session.do("test")
        scores.append(await session.environment.score(outcome))

    within(world, test)
    return scores[0]


def test_what_a_solved_episode_is_worth() -> None:
    score = scored(here(), "submitted", (3, ">", "<"), num_tests=1)
    assert score.rewards == {"solved": 1.0, "submitted": 0.1, "shown": 0.1, "tries": 0.3}
    assert score.patch == {PATH: GOLD.encode()}
    for name in ("solved", "ast_equal", "first_edit_correct", "tested_before_submit", "num_tests", "num_edits"):
        assert score.measures[name] == 1.0, name
    assert score.cpu_s.keys() == {"sandbox", "grade_tests", "grade_replay"}


def test_a_solved_episode_that_hit_a_limit_is_solved_but_not_submitted() -> None:
    score = scored(here(), "step_limit", (3, ">", "<"))
    assert score.rewards == {"solved": 1.0, "submitted": 0.0, "shown": 0.1, "tries": 0.3}


def test_giving_up_early_earns_nothing_and_trying_on_earns_a_little() -> None:
    early = scored(here(), "submitted")
    assert sum(early.rewards.values()) == 0.0 and early.patch == {}
    untested = scored(here(), "submitted", (5, ">", ">="))
    assert sum(untested.rewards.values()) == 0.0
    tried = scored(here(), "step_limit", (5, ">", ">="), (5, ">=", "<"), num_tests=2)
    assert tried.rewards == {"solved": 0.0, "submitted": 0.0, "shown": 0.0, "tries": pytest.approx(0.2)}
    assert (tried.measures["num_tests"], tried.measures["tested_before_submit"]) == (4.0, 0.0)


def test_reward_versions_tell_weights_apart() -> None:
    assert MendRewards().version == MendRewards().version != MendRewards(tries=0.2).version
    with pytest.raises(ValueError, match="negative"):
        MendRewards(shown=-0.1)
    with pytest.raises(ValueError, match="outweigh"):
        MendRewards(shown=0.6, tries=0.4)


def test_a_task_of_another_world_is_refused() -> None:
    async def never(session: Session) -> None:
        raise AssertionError

    world = here()
    world.task = msgspec.structs.replace(world.task, data={"path": "other.py"})
    with pytest.raises(Exception, match=r"other\.py"):
        within(world, never)
    other = Layer(python="3.0.0", packages=())
    world = here()
    world.layers = {digest(other): other}
    with pytest.raises(Exception, match="layer that is not here"):
        within(world, never)
    assert FAULTY != GOLD
