"""Telling what an agent does changes nothing of what it does, under the grammar as without it."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from support.episode_parts import ATTEMPT
from support.mend_task import mend_world
from support.small_policy import small_policy_run
from tidemill.core.records import Episode
from tidemill.engines.batcher import EngineConfig
from tidemill.engines.embedded import EmbeddedEngine
from tidemill.episodes.generation import Sampling
from tidemill.episodes.grading import Grader
from tidemill.episodes.harness import run_episode
from tidemill.episodes.mend import MendEnvironment
from tidemill.run.agent.narration import NarratedEnvironment, NarratedRenderer
from tidemill.run.policy import Policy, open_policy
from tidemill.sandboxes.layers import installed_layer
from tidemill.sandboxes.local import LocalTier


def played(policy: Policy, sampling: Sampling, seed: int, said: list[str] | None) -> Episode:
    """One episode of the same seed; told to `said` where it is given."""
    world = mend_world(layer=installed_layer(["pytest"]), failure="failed: assert 0 == 1", max_sampled_tokens=120)
    task = msgspec.structs.replace(
        world.task, limits=msgspec.structs.replace(world.task.limits, max_context_tokens=1000)
    )

    async def main() -> Episode:
        tier = LocalTier("test-narration", i_know_this_is_not_a_sandbox=True)
        engine = EmbeddedEngine(EngineConfig(num_slots=1, context_tokens=1000))
        engine.swap(policy.version, policy.weights)
        grader = Grader(tier, world, world.blobs, world.layers)
        environment = MendEnvironment(tier, blobs=world.blobs, layers=world.layers, grader=grader)
        renderer = policy.renderer()
        try:
            return await run_episode(
                task,
                attempt=msgspec.structs.replace(ATTEMPT, seed=seed),
                environment=environment if said is None else NarratedEnvironment(environment, said.append),
                renderer=renderer if said is None else NarratedRenderer(renderer, said.append),
                engine=engine,
                sampling=sampling,
            )
        finally:
            await engine.close()
            await tier.close()

    return asyncio.run(main())


@pytest.mark.parametrize("constrained", [False, True])
def test_a_told_episode_is_the_untold_one(tmp_path: Path, constrained: bool) -> None:
    policy = open_policy(str(small_policy_run(tmp_path / "run").path), None)
    num_turns = 0
    for seed in range(4 if constrained else 1):
        said: list[str] = []
        quiet, told = (played(policy, Sampling(constrained=constrained), seed, words) for words in (None, said))
        assert len(said) >= len(told.segments[0].steps)
        for one, other in zip(quiet.segments[0].steps, told.segments[0].steps, strict=True):
            num_turns += 1
            assert one.generation.prompt_ids.data == other.generation.prompt_ids.data
            assert one.generation.token_ids.data == other.generation.token_ids.data
            assert one.generation.logprobs.data == other.generation.logprobs.data
        assert (quiet.outcome, quiet.harness_hash, quiet.patch) == (told.outcome, told.harness_hash, told.patch)
    assert num_turns > 2 or not constrained, "a grammar ends a call soon enough for a second one"
