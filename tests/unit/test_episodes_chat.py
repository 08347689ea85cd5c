"""A chat model plays by the rules of the policy: limits, outcomes, errors; against a scripted server."""

import asyncio
import json
import socket
from typing import Any

import pytest

from support.chat_server import Answer, ChatServer, Script, chat_server, reply, turns
from support.episode_parts import ATTEMPT, Echo, echo_task
from tidemill.core.errors import EngineError, EngineUnavailable, UsageError
from tidemill.core.records import Episode, Task
from tidemill.episodes import outages
from tidemill.episodes.chat import cut, run_chat_episode
from tidemill.episodes.chat_client import ChatClient, tool_schema
from tidemill.episodes.conduct import HarnessConfig

ECHO, SUBMIT = ("echo", {"text": "hello"}), ("submit", {})


def play(
    script: Script,
    task: Task | None = None,
    *,
    environment: Echo | None = None,
    config: HarnessConfig | None = None,
    api_key: str | None = None,
    **options: Any,
) -> tuple[Episode, ChatServer]:
    async def main(url: str) -> Episode:
        client = ChatClient(url, model="tiny", api_key=api_key)
        try:
            return await run_chat_episode(
                task or echo_task(),
                attempt=ATTEMPT,
                environment=environment or Echo(),
                client=client,
                temperature=0.5,
                config=config,
            )
        finally:
            await client.close()

    with chat_server(script, **options) as server:
        return asyncio.run(main(server.url)), server


def roles(messages: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


def test_a_whole_conversation() -> None:
    environment = Echo()
    episode, server = play(turns(reply(ECHO, text="let me see"), reply(SUBMIT)), environment=environment)
    assert (episode.outcome, episode.reward, environment.num_closed) == ("submitted", 1.0, 1)
    assert [call.name for step in episode.segments[0].steps for call in step.calls] == ["echo", "submit"]
    first, second = server.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["echo", "submit"]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("tiny", 0.5, 200)
    assert second["max_tokens"] == 193, "what it said is charged to its budget"
    assert roles(second["messages"]) == ["system", "user", "assistant", "tool"]
    assert second["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"text": "hello"}'
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "id-0", "content": "said hello"}
    assert episode.measures["completion_tokens"] == 14
    assert server.keys == [None, None]


def test_tools_become_json_schema() -> None:
    schema = tool_schema(Echo.tools[0])["function"]["parameters"]
    assert schema["additionalProperties"] is False, "this API is told so, documents of episodes are not"
    assert schema["properties"] == {"text": {"type": "string"}} and schema["required"] == ["text"]


def test_the_key_is_sent_and_told_nowhere() -> None:
    with pytest.raises(EngineError, match=r"401.*--api-key-env") as caught:
        play(turns((401, {"error": {"message": "bad key"}})), api_key="sk-secret")
    assert "secret" not in str(caught.value)
    _, server = play(turns(reply(SUBMIT)), api_key="sk-secret")
    assert server.keys == ["Bearer sk-secret"]


@pytest.mark.parametrize(
    "call, kind",
    [
        (("echo", "{not json"), "malformed"),
        (("echo", "[1]"), "malformed"),
        (("echo", {"words": 1}), "bad_arguments"),
        (("shout", {}), "unknown_tool"),
    ],
)
def test_a_malformed_call_is_told_to_the_model_and_counted(call: tuple[str, Any], kind: str) -> None:
    episode, server = play(turns(reply(call), reply(SUBMIT)))
    assert episode.outcome == "submitted"
    assert episode.measures["malformed_calls"] == 1
    assert episode.segments[0].steps[0].observations[0].error == kind
    told = server.requests[1]["messages"]
    assert told[-1]["role"] == "tool" and told[-1]["content"].startswith("error:")
    json.loads(told[-2]["tool_calls"][0]["function"]["arguments"])


def test_replies_without_a_call_end_as_format_errors() -> None:
    episode, server = play(turns(reply(text="I think that", finish="stop")))
    assert episode.outcome == "format_errors"
    assert len(server.requests) == HarnessConfig().max_format_errors
    assert roles(server.requests[1]["messages"]) == ["system", "user", "assistant", "user"]


def test_going_round_in_circles_ends() -> None:
    episode, _ = play(turns(reply(ECHO)))
    assert episode.outcome == "loop"


def test_the_limits_of_the_policy_hold() -> None:
    said = iter(range(100))

    def talks(messages: list[dict[str, Any]]) -> Answer:
        return reply(("echo", {"text": f"{next(said)}"}), tokens=60)

    episode, server = play(talks, echo_task(max_steps=3, max_sampled_tokens=1000))
    assert (episode.outcome, len(server.requests)) == ("step_limit", 3)
    episode, server = play(talks, echo_task(max_sampled_tokens=100))
    assert (episode.outcome, [r["max_tokens"] for r in server.requests]) == ("token_limit", [100, 40])
    episode, _ = play(talks, echo_task(wall_s=0.3), environment=Echo(slow_s=1.0))
    assert episode.outcome == "wall_limit"


def test_calls_of_one_turn_count_as_turns() -> None:
    """The policy makes one call a turn: who makes several at once gets no more of them."""
    environment = Echo()
    many = reply(*[("echo", {"text": str(n)}) for n in range(5)])
    episode, server = play(turns(many), echo_task(max_steps=3), environment=environment)
    assert episode.outcome == "step_limit" and environment.heard == ["0", "1", "2"]
    assert len(server.requests) == 1


def test_calls_with_the_same_id_are_told_apart() -> None:
    first = reply(("echo", {"text": "a"}), ("echo", {"text": "b"}))
    for call in first[1]["choices"][0]["message"]["tool_calls"]:
        call["id"] = "same"
    environment = Echo()
    _, server = play(turns(first, reply(SUBMIT)), environment=environment)
    assert environment.heard == ["a", "b"]
    answered = [m["tool_call_id"] for m in server.requests[1]["messages"] if m["role"] == "tool"]
    said = [call["id"] for call in server.requests[1]["messages"][2]["tool_calls"]]
    assert answered == said and len(set(said)) == 2


def test_an_endpoint_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "FIRST_BACKOFF_S", 0.01)
    busy = (429, {"error": {"message": "slow down"}}, {"retry-after": "0.05"})
    episode, server = play(turns(busy, (503, "overloaded"), reply(ECHO), (500, "oops"), reply(SUBMIT)))
    assert episode.outcome == "submitted"
    assert len(server.requests) == 5
    assert [event.what for event in episode.events].count("engine_away") == 3
    assert episode.timings_s["engine_away"] >= 0.05


def test_an_endpoint_that_stays_away_is_given_up() -> None:
    with pytest.raises(EngineUnavailable, match=r"stayed away for 0.2 s.*503.*overloaded"):
        play(turns((503, "overloaded")), config=HarnessConfig(engine_patience_s=0.2))


@pytest.mark.parametrize(
    "answer, told",
    [
        ((404, {"error": {"message": "The model `tiny` does not exist"}}), "404.*does not exist.*--model"),
        ((200, "<html>hello</html>"), "no chat completion.*hello"),
        ((200, {"choices": [], "usage": {"completion_tokens": 0}}), "no chat completion"),
        ((200, {"choices": [{"message": {"content": "x"}}]}), "usage"),
    ],
)
def test_what_was_wrong_from_the_start_is_one_clear_line(answer: Answer, told: str) -> None:
    with pytest.raises(EngineError, match=told) as caught:
        play(turns(answer))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [(400, "too long"), (200, "{}")])
def test_later_it_is_a_fault_of_that_attempt(answer: Answer) -> None:
    environment = Echo()
    episode, _ = play(turns(reply(ECHO), answer), environment=environment)
    assert episode.outcome == "env_fault" and environment.num_closed == 1
    assert "fault" in [event.what for event in episode.events]


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        client = ChatClient(url)
        with pytest.raises(EngineError, match=r"cannot be reached.*start the server") as caught:
            asyncio.run(client.models())
    assert not isinstance(caught.value, EngineUnavailable)


def test_a_newer_name_of_the_limit_is_understood() -> None:
    def script(messages: list[dict[str, Any]]) -> Answer:
        if "max_tokens" in server.requests[-1]:
            return 400, {"error": {"message": "Unsupported parameter: use 'max_completion_tokens' instead."}}
        return reply(SUBMIT)

    async def main() -> Episode:
        client = ChatClient(server.url, model="tiny")
        try:
            return await run_chat_episode(
                echo_task(), attempt=ATTEMPT, environment=Echo(), client=client, temperature=1.0
            )
        finally:
            await client.close()

    with chat_server(script) as server:
        assert asyncio.run(main()).outcome == "submitted"
    assert [("max_completion_tokens" in request) for request in server.requests] == [False, True]


def test_an_address_that_is_none() -> None:
    with pytest.raises(UsageError, match="no URL"):
        ChatClient("localhost:8000")


def test_long_observations_lose_their_middle() -> None:
    assert cut("short", 10) == "short"
    assert len(cut("x" * 1000, 100)) == 100
    episode, server = play(turns(reply(("echo", {"text": "y" * 500})), reply(SUBMIT)))
    assert len(server.requests[1]["messages"][3]["content"]) == 80
    assert len(episode.segments[0].steps[0].observations[0].text) > 500, "the record keeps all of it"
