"""How an episode goes and ends; what each failure becomes."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from support.episode_parts import ATTEMPT, Echo, echo_task, play, renderer, say, tokenizer
from tidemill.core.errors import EngineError, EngineUnavailable, RequestRefused, SandboxFault
from tidemill.core.records import Episode, Outcome
from tidemill.core.seams import Chunk, EngineStatus, GenerationRequest, Score, ToolSpec
from tidemill.episodes.conduct import HarnessConfig, harness_hash
from tidemill.episodes.generation import Sampling
from tidemill.episodes.harness import run_episode
from tidemill.episodes.results import attempt_result
from tidemill.episodes.scripted import ScriptedEngine, script_of
from tidemill.text.tokenizer import END

ECHO = say("echo", text="hello")
SUBMIT = say("submit")
BAD = say("erase")


def faults(episode: Episode) -> list[str]:
    return [event.detail for event in episode.events if event.what == "fault"]


def test_an_episode_from_start_to_end() -> None:
    environment = Echo()
    episode = play(ScriptedEngine(script_of([ECHO, SUBMIT]), version=4), environment, echo_task())
    assert episode.outcome == environment.outcome == "submitted"
    assert (episode.reward, episode.rewards) == (1.0, {"heard": 1.0})
    assert episode.measures == {"solved": 1.0, "steps": 2.0, "malformed_calls": 0.0}
    (segment,) = episode.segments
    first, second = segment.steps
    assert segment.opened_by == "start"
    assert first.calls[0].arguments == {"text": "hello"}
    assert first.observations[0].text == "said hello"
    assert tokenizer().decode(second.generation.prompt_ids.numpy().tolist()) == "<|obs|>said hello<|call|>"
    assert second.generation.position == first.generation.prompt_ids.shape[0] + first.generation.token_ids.shape[0]
    assert first.generation.versions.numpy().tolist() == [4] * len(ECHO)
    assert {"sandbox_open", "generate", "tools", "grade", "close"} <= set(episode.timings_s)
    assert environment.num_closed == 1


def test_the_engine_is_always_asked_with_what_was_sampled() -> None:
    engine = ScriptedEngine(script_of([ECHO, ECHO, SUBMIT]))
    episode = play(engine, Echo(), echo_task())
    ids: list[int] = []
    for step, request in zip(episode.segments[0].steps, engine.requests, strict=True):
        ids += step.generation.prompt_ids.numpy().tolist()
        assert request.prompt_ids == ids
        ids += step.generation.token_ids.numpy().tolist()


@pytest.mark.parametrize(
    ("turns", "limits", "outcome"),
    [
        ([say("echo", text=str(n)) for n in range(9)], {"max_steps": 3}, "step_limit"),
        ([say("echo", text=str(n)) for n in range(9)], {"max_sampled_tokens": 9}, "token_limit"),
        ([say("echo", text=str(n)) for n in range(9)], {"max_context_tokens": 40}, "token_limit"),
        ([ECHO] * 9, {}, "loop"),
        ([BAD, ECHO, BAD, BAD, BAD, ECHO], {}, "format_errors"),
        ([[], [], []], {}, "format_errors"),
    ],
)
def test_limits_end_an_episode_and_it_is_scored_all_the_same(
    turns: list[list[int]], limits: dict[str, int], outcome: Outcome
) -> None:
    environment = Echo()
    task = echo_task(**limits)  # type: ignore[arg-type]
    episode = play(ScriptedEngine(script_of(turns)), environment, task)
    assert episode.outcome == environment.outcome == outcome
    assert episode.reward == len(environment.heard)
    sampled = sum(step.generation.token_ids.shape[0] for step in episode.segments[0].steps)
    assert sampled <= task.limits.max_sampled_tokens
    last = episode.segments[0].steps[-1].generation
    assert last.position + last.prompt_ids.shape[0] + last.token_ids.shape[0] <= task.limits.max_context_tokens


def test_the_budget_counts_tokens_and_the_last_generation_gets_the_rest_of_it() -> None:
    engine = ScriptedEngine(script_of([ECHO, ECHO, ECHO]))
    budget = 2 * len(ECHO) + 2
    episode = play(engine, Echo(), echo_task(max_sampled_tokens=budget))
    assert [request.max_tokens for request in engine.requests] == [budget, budget - len(ECHO), 2]
    last = episode.segments[0].steps[-1]
    assert last.generation.stop_reason == "length"
    assert [observation.error for observation in last.observations] == ["truncated"]


def test_a_full_budget_with_its_stop_token_is_no_truncation() -> None:
    episode = play(ScriptedEngine(script_of([ECHO])), Echo(), echo_task(max_sampled_tokens=len(ECHO)))
    (step,) = episode.segments[0].steps
    assert (step.generation.stop_reason, episode.outcome) == ("stop", "token_limit")
    assert step.calls


def test_a_malformed_call_becomes_an_observation_and_the_episode_goes_on() -> None:
    environment = Echo()
    episode = play(ScriptedEngine(script_of([BAD, say("echo"), SUBMIT])), environment, echo_task())
    first, second, _ = episode.segments[0].steps
    assert [step.observations[0].error for step in (first, second)] == ["unknown_tool", "bad_arguments"]
    assert first.observations[0].call_id == "call-0"
    assert "echo, submit" in tokenizer().decode(second.generation.prompt_ids.numpy().tolist())
    assert environment.heard == [], "nothing runs with missing arguments"
    assert (episode.outcome, episode.measures["malformed_calls"]) == ("submitted", 2.0)


@pytest.mark.parametrize("stage", ["open", "call", "score"])
@pytest.mark.parametrize("error", [SandboxFault("gone"), RuntimeError("a bug"), TimeoutError("slow"), EngineError("x")])
def test_failures_of_the_environment_are_faults_with_a_reason(stage: str, error: Exception) -> None:
    environment = Echo({stage: error})
    episode = play(ScriptedEngine(script_of([ECHO, SUBMIT])), environment, echo_task())
    assert (episode.outcome, episode.reward, episode.rewards) == ("env_fault", 0.0, {})
    (reason,) = faults(episode)
    assert type(error).__name__ in reason and str(error) in reason
    assert environment.num_closed == 1
    result = attempt_result(episode, "b" * 64, ATTEMPT)
    assert (result.reason, result.outcome) == (reason, "env_fault")


def test_a_failed_close_is_noted_and_changes_nothing() -> None:
    episode = play(ScriptedEngine(script_of([SUBMIT])), Echo({"close": OSError("busy")}), echo_task())
    assert episode.outcome == "submitted"
    assert [event.detail for event in episode.events if event.what == "close_failed"] == ["OSError: busy"]


def test_a_reward_that_is_no_number_is_a_fault() -> None:
    class Broken(Echo):
        async def score(self, outcome: Outcome) -> Score:
            return Score(rewards={"heard": float("nan")})

    episode = play(ScriptedEngine(script_of([SUBMIT])), Broken(), echo_task())
    assert episode.outcome == "env_fault" and "heard" in faults(episode)[0]


def test_a_task_that_fills_the_context_is_a_fault_not_a_failure_of_the_agent() -> None:
    episode = play(ScriptedEngine(script_of([SUBMIT])), Echo(), echo_task(max_context_tokens=4))
    assert episode.outcome == "env_fault" and "max_context_tokens" in faults(episode)[0]
    assert episode.segments == ()


def test_the_wall_limit_interrupts_a_slow_tool_and_a_slow_engine_and_keeps_what_was_sampled() -> None:
    episode = play(ScriptedEngine(script_of([ECHO, SUBMIT])), Echo(slow_s=30.0), echo_task(wall_s=0.2))
    assert episode.outcome == "wall_limit"
    assert episode.segments[0].steps[0].generation.token_ids.numpy().tolist() == ECHO
    slow = ScriptedEngine(script_of([ECHO, SUBMIT]), chunk_tokens=1, delay_s=0.15)
    episode = play(slow, Echo(), echo_task(wall_s=0.2))
    (step,) = episode.segments[0].steps
    assert (episode.outcome, step.generation.stop_reason) == ("wall_limit", "abort")
    assert step.generation.token_ids.numpy().tolist() == ECHO[:1]


def test_an_interrupted_generation_goes_on_with_the_rest_of_its_budget() -> None:
    engine = ScriptedEngine(script_of([ECHO, SUBMIT]), fail_at=[2], chunk_tokens=1, version=3, swap_at={2: 5})
    episode = play(engine, Echo(), echo_task(max_sampled_tokens=50))
    generation = episode.segments[0].steps[0].generation
    assert generation.token_ids.numpy().tolist() == ECHO
    assert generation.versions.numpy().tolist() == [3, 3] + [5] * (len(ECHO) - 2)
    first, second = engine.requests[:2]
    assert second.prompt_ids == first.prompt_ids + ECHO[:2]
    assert (first.max_tokens, second.max_tokens) == (50, 48)
    assert first.seed != second.seed
    assert [event.what for event in episode.events if event.what in ("engine_away", "versions")] == [
        "engine_away",
        "versions",
    ]


def test_an_engine_lost_behind_the_last_token_is_not_asked_again() -> None:
    engine = ScriptedEngine(script_of([SUBMIT]), fail_at=[len(SUBMIT) - 1], chunk_tokens=1)
    play(engine, Echo(), echo_task())
    assert len(engine.requests) == 2

    class LostAtTheEnd:
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
            yield Chunk(token_ids=SUBMIT, logprobs=[0.0] * len(SUBMIT), versions=[0] * len(SUBMIT))
            raise EngineUnavailable("gone")

        async def status(self) -> EngineStatus:
            raise NotImplementedError

        async def close(self) -> None: ...

    episode = play(LostAtTheEnd(), Echo(), echo_task())
    assert (episode.outcome, episode.segments[0].steps[0].generation.stop_reason) == ("submitted", "stop")


def test_old_rows_stand_and_new_ones_follow_after_an_abort() -> None:
    words = say("echo", text="hello hello hello")
    engine = ScriptedEngine(
        script_of([words, SUBMIT]), version=1, swap_at={3: 2}, abort_at=[5], chunk_tokens=2, routes_shape=(3, 2)
    )
    generation = play(engine, Echo(), echo_task()).segments[0].steps[0].generation
    num_prompt = generation.prompt_ids.shape[0]
    kv_versions = generation.kv_versions.numpy()
    assert generation.row_start == 0
    assert len(kv_versions) == num_prompt + len(words) - 1, "the last token was never fed"
    expected = [1] * (num_prompt + 2) + [2] * (len(words) - 3)  # though the resumed stream computed all of it at 2
    assert kv_versions.tolist() == expected
    assert generation.routes is not None
    assert np.array_equal(generation.routes.numpy(), engine.routes(kv_versions.tolist()))


def test_an_engine_that_stays_away_is_a_fault_and_not_the_agents_time() -> None:
    class Away:
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
            raise EngineUnavailable("no route")
            yield

        async def status(self) -> EngineStatus:
            raise NotImplementedError

        async def close(self) -> None: ...

    episode = play(Away(), Echo(), echo_task(wall_s=0.2), config=HarnessConfig(engine_patience_s=0.3))
    assert episode.outcome == "env_fault" and "no route" in faults(episode)[0]
    assert episode.timings_s["engine_away"] >= 0.2


def test_a_refused_request_is_a_fault() -> None:
    class Refusing:
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
            raise RequestRefused("too long")
            yield

        async def status(self) -> EngineStatus:
            raise NotImplementedError

        async def close(self) -> None: ...

    episode = play(Refusing(), Echo(), echo_task())
    assert episode.outcome == "env_fault" and "too long" in faults(episode)[0]


def test_an_engine_that_breaks_its_contract_stops_the_worker_and_still_closes_the_environment() -> None:
    class Forgetful:
        async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
            yield Chunk(token_ids=[9, 9], logprobs=[-0.5], versions=[0, 0])

        async def status(self) -> EngineStatus:
            raise NotImplementedError

        async def close(self) -> None: ...

    environment = Echo()
    with pytest.raises(EngineError, match="none may be missing"):
        play(Forgetful(), environment, echo_task())
    assert environment.num_closed == 1


def test_a_cancelled_episode_closes_its_environment() -> None:
    environment = Echo(slow_s=30.0)

    async def cancelled() -> None:
        task = asyncio.create_task(
            run_episode(
                echo_task(),
                attempt=ATTEMPT,
                environment=environment,
                renderer=renderer(),
                engine=ScriptedEngine(script_of([ECHO])),
                sampling=Sampling(),
            )
        )
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert environment.num_closed == 1


def test_a_result_names_the_versions_that_spoke() -> None:
    engine = ScriptedEngine(script_of([ECHO, SUBMIT]), version=6, swap_at={len(ECHO): 8})
    episode = play(engine, Echo(), echo_task())
    result = attempt_result(episode, "a" * 64, ATTEMPT)
    assert (result.oldest_version, result.newest_version) == (6, 8)
    assert result.sampled_tokens == len(ECHO) + len(SUBMIT)
    assert (result.lease_id, result.reward, result.reason) == ("lease-1", 1.0, "")


def test_the_harness_hash_tells_tools_and_renderers_apart() -> None:
    tool = ToolSpec(name="a", description="", parameters={"x": "string", "y": "integer"}, required=())
    turned = ToolSpec(name="a", description="", parameters={"y": "integer", "x": "string"}, required=())
    hashes = {harness_hash([tool], "compact-1"), harness_hash([turned], "compact-1"), harness_hash([tool], "chat-1")}
    assert len(hashes) == 3
    assert tokenizer().special(END) in renderer().stop_ids
