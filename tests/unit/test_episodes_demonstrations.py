"""Scripted policies of the family mend, through the same harness as a policy."""

import asyncio
import random

import pytest

from support.mend_task import FAULTY, GOLD, PATH, World, mend_world, tree
from tidemill.core.records import Attempt, Episode
from tidemill.episodes.demonstrations import Demonstrator, NoOp, swapped_word, swapped_words, taken_back
from tidemill.episodes.generation import Sampling
from tidemill.episodes.grading import Grader
from tidemill.episodes.harness import run_episode
from tidemill.episodes.mend import MendEnvironment
from tidemill.episodes.scripted import Policy, ScriptedEngine, spoken
from tidemill.episodes.syntax import same_syntax, syntax_error
from tidemill.sandboxes.layers import installed_layer
from tidemill.sandboxes.local import LocalTier
from tidemill.text.compact import CompactRenderer
from tidemill.text.tokenizer import Tokenizer
from tidemill.text.windows import edits_between
from tidemill.trajectories.build import trajectories, without_steps


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([GOLD] * 3, 500)


def here(**changes: object) -> World:
    return mend_world(layer=installed_layer(["pytest"]), **changes)  # type: ignore[arg-type]


def demonstrated(world: World, policy: Policy, tokenizer: Tokenizer, seed: int = 0) -> Episode:
    renderer = CompactRenderer(tokenizer)

    async def main() -> Episode:
        tier = LocalTier("test-demonstrations", i_know_this_is_not_a_sandbox=True)
        grader = Grader(tier, world, world.blobs, world.layers)
        try:
            return await run_episode(
                world.task,
                attempt=Attempt(
                    id="a",
                    group_id="g",
                    task_id=world.task.id,
                    stage="sft",
                    seed=seed,
                    lease_id="l",
                    lease_until_s=0.0,
                    try_index=0,
                ),
                environment=MendEnvironment(tier, blobs=world.blobs, layers=world.layers, grader=grader),
                renderer=renderer,
                engine=ScriptedEngine(spoken(policy, renderer)),
                sampling=Sampling(),
                sandbox_tier="local",
            )
        finally:
            await tier.close()

    return asyncio.run(main())


def calls(episode: Episode) -> list[str]:
    return [call.name for step in episode.segments[0].steps for call in step.calls]


def test_the_oracle_edits_tests_and_submits(tokenizer: Tokenizer) -> None:
    world = here()
    oracle = Demonstrator(world.task, world.repository, world.hidden, gold_probability=1.0, seed=0)
    episode = demonstrated(world, oracle, tokenizer)
    assert calls(episode) == ["edit", "test", "submit"]
    assert episode.outcome == "submitted" and episode.measures["solved"] == 1.0
    assert episode.measures["first_edit_correct"] == 1.0
    versions = {int(v) for step in episode.segments[0].steps for v in step.generation.versions.numpy()}
    assert versions == {-1}, "no policy sampled these"


def test_no_op_submits_at_once_and_earns_nothing(tokenizer: Tokenizer) -> None:
    episode = demonstrated(here(), NoOp(), tokenizer)
    assert calls(episode) == ["submit"] and episode.reward == 0.0


@pytest.mark.parametrize("seed", [1, 2])
def test_a_demonstrator_that_errs_first_persists_until_it_passes(tokenizer: Tokenizer, seed: int) -> None:
    world = here(max_steps=12)
    policy = Demonstrator(world.task, world.repository, world.hidden, gold_probability=0.0, seed=seed)
    episode = demonstrated(world, policy, tokenizer, seed)
    said = calls(episode)
    assert said[:2] == ["edit", "test"] and said[-2:] == ["test", "submit"]
    assert said.count("test") >= 2, "the first try was wrong"
    assert episode.measures["solved"] == 1.0 and episode.outcome == "submitted"
    assert episode.measures["num_edits_refused"] == 0 and episode.measures["malformed_calls"] == 0


def test_the_same_seed_plays_the_same_episode(tokenizer: Tokenizer) -> None:
    said = []
    for _ in range(2):
        world = here()
        policy = Demonstrator(world.task, world.repository, world.hidden, gold_probability=0.3, seed=5)
        said.append([step.text for step in demonstrated(world, policy, tokenizer).segments[0].steps])
    assert said[0] == said[1]


def test_the_blind_agent_knows_no_answer_and_uses_its_steps(tokenizer: Tokenizer) -> None:
    world = here(max_steps=8)
    blind = Demonstrator(world.task, world.repository, None, gold_probability=0.6, seed=1)
    episode = demonstrated(world, blind, tokenizer)
    assert calls(episode).count("test") >= 2
    assert episode.outcome in ("submitted", "step_limit")


def test_a_fault_outside_the_window_is_read_first(tokenizer: Tokenizer) -> None:
    faulty = GOLD.replace("max(values) - min", "max(values) + min")
    world = here(faulty=faulty)
    oracle = Demonstrator(world.task, world.repository, world.hidden, gold_probability=1.0, seed=0)
    episode = demonstrated(world, oracle, tokenizer)
    assert calls(episode)[:3] == ["read", "edit", "test"]
    assert episode.patch == {PATH: GOLD.encode()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FAULTY, GOLD),
        (GOLD.replace("        return low\n", ""), GOLD),
        (GOLD, GOLD.replace("        return low\n", "        low = low\n        return low\n")),
        ("a = 1\n\n\n\nb = 2\n", "a = 1\n\nb = 3\n"),
        ("a = 1\nb = 2\nc = 3", "c = 3"),
        ("b = 2", "a = 1\nb = 2"),
    ],
)
def test_edits_lead_from_one_version_to_the_other(before: str, after: str) -> None:
    lines = before.split("\n")
    for line, old, new in edits_between(before, after):
        assert old in lines[line - 1]
        lines[line - 1 : line] = lines[line - 1].replace(old, new, 1).split("\n")
    assert same_syntax("\n".join(lines), after) or "\n".join(lines) == after


def test_guesses_stay_in_the_window_and_mostly_parse() -> None:
    guesses = [swapped_word(GOLD, 4, 10, random.Random(seed)) for seed in range(60)]
    made = [guess for guess in guesses if guess is not None]
    assert len(set(made)) > 8
    for guess in made:
        (line, _, _), *rest = edits_between(GOLD, guess)
        assert 4 <= line <= 10 and not rest
    assert sum(syntax_error(guess) is None for guess in made) > len(made) / 2
    assert swapped_word("\n\n", 1, 2, random.Random(0)) is None
    assert tree(ranges=GOLD).files[0].path == PATH


def test_all_words_that_can_be_swapped_are_those_that_are_drawn() -> None:
    every = swapped_words(FAULTY, 4, 10)
    assert len(set(every)) == len(every) and FAULTY not in every and GOLD in every
    drawn = {swapped_word(FAULTY, 4, 10, random.Random(seed)) for seed in range(2000)} - {None}
    assert drawn <= set(every)
    assert len(drawn) > 0.8 * len(every)


def test_what_a_demonstration_takes_back_is_shown_and_not_taught(tokenizer: Tokenizer) -> None:
    world = here(max_steps=12)
    policy = Demonstrator(world.task, world.repository, world.hidden, gold_probability=0.0, seed=1)
    episode = demonstrated(world, policy, tokenizer, 1)
    (segment,) = episode.segments
    (before,) = trajectories(episode)
    wrong = taken_back(segment.steps)
    assert wrong and calls(episode).count("undo") == len(wrong)
    after = without_steps(before, segment, wrong)
    gone = before.sampled_mask.numpy() & ~after.sampled_mask.numpy()
    assert gone.sum() == sum(segment.steps[index].generation.token_ids.shape[0] for index in wrong)
    last_edit = max(index for index, step in enumerate(segment.steps) if step.calls[0].name == "edit")
    assert last_edit not in wrong, "the edit that mended it is taught"
