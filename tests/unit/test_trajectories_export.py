"""Episodes as ATIF documents: ids and logprobs as they were, results that name a call of their own step."""

import json

from support.episode_parts import Echo, echo_task, play, say, tokenizer
from tidemill.core.records import Episode
from tidemill.episodes.scripted import ScriptedEngine, script_of
from tidemill.trajectories.export import atif

TURNS = [say("echo", text="hello"), say("erase"), say("submit")]


def document(episode: Episode) -> dict[str, object]:
    made = atif(episode, decode=tokenizer().decode, tools=Echo().tools, agent_version="1", model_name="policy")
    return dict(json.loads(json.dumps(made)))


def test_an_episode_as_a_document() -> None:
    episode = play(ScriptedEngine(script_of(TURNS), version=2), Echo(), echo_task())
    made = document(episode)
    steps = made["steps"]
    assert isinstance(steps, list)
    assert made["schema_version"] == "ATIF-v1.8"
    assert made["agent"]["tool_definitions"][0]["function"]["parameters"] == {  # type: ignore[index]
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    }
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4]
    assert [step["source"] for step in steps] == ["user", "agent", "agent", "agent"]
    ids: list[int] = []
    for step, told, turn in zip(episode.segments[0].steps, steps[1:], TURNS, strict=True):
        ids += step.generation.prompt_ids.numpy().tolist()
        assert told["metrics"]["prompt_token_ids"] == ids
        assert told["metrics"]["completion_token_ids"] == turn
        assert told["metrics"]["logprobs"] == [0.0] * len(turn)
        ids += turn
    assert steps[1]["tool_calls"] == [
        {"tool_call_id": "call-0", "function_name": "echo", "arguments": {"text": "hello"}}
    ]
    assert steps[1]["observation"]["results"] == [{"source_call_id": "call-0", "content": "said hello"}]
    assert "tool_calls" not in steps[2]
    assert "source_call_id" not in steps[2]["observation"]["results"][0]


def test_an_episode_without_a_step_is_a_document_all_the_same() -> None:
    episode = play(ScriptedEngine(script_of([])), Echo({"open": RuntimeError("x")}), echo_task())
    assert len(document(episode)["steps"]) == 1  # type: ignore[arg-type]
