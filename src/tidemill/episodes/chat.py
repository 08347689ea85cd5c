"""A chat model at work: the same tasks, tools, limits and grading as the policy, behind an API that speaks text.

Nothing here is trained on: such an episode has no token ids. Its turns are limited as the policy's are, and a turn of
several calls counts as several: the policy makes one call a turn.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, final

import msgspec

from tidemill.core.errors import EngineUnavailable, RequestRefused
from tidemill.core.records import Array, Attempt, Episode, Generation, Observation, Outcome, StopReason, Task, ToolCall
from tidemill.core.seams import Environment, ToolSpec, Turn
from tidemill.episodes.chat_client import ChatCall, ChatClient, ChatReply
from tidemill.episodes.conduct import Conduct, Fault, HarnessConfig, WallLimit
from tidemill.episodes.outages import EngineGone
from tidemill.text.calls import fault, named_call, without_duplicates

NAME = "chat-1"
"""In place of a renderer's name in the harness hash."""
CHARS_PER_TOKEN = 4
"""Observations are cut by characters: the model's own tokens are not known here."""
CUT_MARK = "\n...\n"
Message = dict[str, Any]


def system_text(max_steps: int) -> str:
    """What the model is told beside the task."""
    return (
        "You solve a task by calling tools. Every reply must call a tool; text beside the call is not read. "
        f"You have {max_steps} calls in all. Lines are numbered from the top of the window that you see. "
        "The task is done when you submit it."
    )


async def run_chat_episode(
    task: Task,
    *,
    attempt: Attempt,
    environment: Environment,
    client: ChatClient,
    temperature: float,
    config: HarnessConfig | None = None,
    sandbox_tier: str = "none",
    clock: Callable[[], float] = time.monotonic,
) -> Episode:
    """One attempt, to its end. The task's limits hold, but for its context: that is the endpoint's own.

    Measures have `completion_tokens` and `prompt_tokens`, as the endpoint counts them. Raises `EngineError` where the
    endpoint cannot be used, or stays away; every other failure is an `env_fault` on the episode.
    """
    run = _ChatRun(client, temperature, task=task, attempt=attempt, environment=environment, config=config, clock=clock)
    return await run.whole(renderer=NAME, sandbox_tier=sandbox_tier)


@final
class _ChatRun(Conduct):
    """Turns in messages."""

    def __init__(self, client: ChatClient, temperature: float, **rest: Any) -> None:
        super().__init__(**rest)
        self.client = client
        self.temperature = temperature
        self.messages: list[Message] = []
        self.num_completion = self.num_prompt = 0

    async def play(self, text: str) -> Outcome:
        limits = self.task.limits
        self.messages = [
            {"role": "system", "content": system_text(limits.max_steps)},
            {"role": "user", "content": text},
        ]
        habits = self.config.habits()
        calls_left = limits.max_steps
        try:
            while True:
                reply = await self.ask(limits.max_sampled_tokens - self.num_completion)
                turn, echo = parse(reply, self.environment.tools, len(self.steps))
                allowed = msgspec.structs.replace(turn, calls=turn.calls[:calls_left])
                observations, ends = await self.act(self.generation(reply), allowed)
                ends = ends or habits.after(allowed, observations)
                if ends is not None:
                    return ends
                calls_left -= max(1, len(observations))
                if calls_left <= 0:
                    return "step_limit"
                if self.num_completion >= limits.max_sampled_tokens:
                    return "token_limit"
                self.messages.append(echo)
                self.messages += [self.told(observation, turn) for observation in observations]
        except WallLimit:
            return "wall_limit"

    async def ask(self, max_tokens: int) -> ChatReply:
        """One reply, asked for as often as the endpoint goes away; that time is not the agent's."""
        while True:
            asked_s = self.clock()
            try:
                reply = await self.limited("generate", lambda: self.request(max_tokens))
                break
            except EngineUnavailable as error:
                self.note("engine_away", str(error))
                cause = str(error)
            except RequestRefused as error:
                raise Fault(str(error)) from error
            try:
                await self.outages.wait(asked_s, cause, at_least_s=self.client.retry_s)
            except EngineGone as error:
                raise EngineUnavailable(f"{error} (what is done is kept; the same command goes on)") from error
        self.outages.progressed()
        self.num_completion += reply.completion_tokens
        self.num_prompt += reply.prompt_tokens
        return reply

    async def request(self, max_tokens: int) -> ChatReply:
        return await self.client.complete(
            self.messages, self.environment.tools, max_tokens=max_tokens, temperature=self.temperature
        )

    def told(self, observation: Observation, turn: Turn) -> Message:
        text = cut(observation.text, self.task.limits.max_observation_tokens * CHARS_PER_TOKEN)
        if observation.call_id:
            return {"role": "tool", "tool_call_id": observation.call_id, "content": text}
        return {"role": "user", "content": text}

    def generation(self, reply: ChatReply) -> Generation:
        """Without tokens: the API tells none."""
        none = Array.of([], "int32")
        reason: StopReason = "length" if reply.is_cut else "stop"
        return Generation(
            position=0,
            prompt_ids=none,
            token_ids=none,
            logprobs=Array.of([], "float32"),
            versions=none,
            temperature=self.temperature,
            top_p=1.0,
            top_k=0,
            support_ids=None,
            support_offsets=None,
            row_start=0,
            kv_versions=none,
            routes=None,
            stop_reason=reason,
            engine=f"{self.client.endpoint} {self.client.model}",
        )

    def measures(self) -> dict[str, float]:
        tokens = {"completion_tokens": float(self.num_completion), "prompt_tokens": float(self.num_prompt)}
        return super().measures() | tokens


def parse(reply: ChatReply, tools: Sequence[ToolSpec], turn: int) -> tuple[Turn, Message]:
    """The checked calls of a reply, and the message that says it again in the next request.

    Never raises: what cannot be parsed becomes an error for the model to see.
    """
    results: list[ToolCall | Observation] = []
    said: list[dict[str, Any]] = []
    used: set[str] = set()
    for number, call in enumerate(reply.calls):
        # Answers go by id: one that is missing or used already gets one of ours.
        id_ = call.id if call.id and call.id not in used else f"call_{turn}_{number}"
        used.add(id_)
        results.append(_checked(id_, call, tools))
        said.append({"id": id_, "type": "function", "function": {"name": call.name, "arguments": _echo(call)}})
    if not results:
        results.append(
            fault("", "truncated", "the reply was cut off: say less")
            if reply.is_cut
            else fault("", "empty", "no tool was called: every reply must call one")
        )
    calls, errors = without_duplicates(results)
    echo: Message = {"role": "assistant", "content": reply.text}
    if said:
        echo["tool_calls"] = said
    return Turn(text=reply.text, calls=calls, errors=errors), echo


def _checked(id_: str, call: ChatCall, tools: Sequence[ToolSpec]) -> ToolCall | Observation:
    try:
        arguments = msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return fault(id_, "malformed", "the arguments are no JSON")
    if not isinstance(arguments, dict):
        return fault(id_, "malformed", "the arguments are no JSON object")
    given = [(name, value) for name, value in arguments.items() if value is not None]
    return named_call(id_, call.name, given, tools)


def _echo(call: ChatCall) -> str:
    """Arguments that are no JSON make some servers refuse the whole conversation."""
    try:
        msgspec.json.decode(call.arguments)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "{}"
    return call.arguments


def cut(text: str, max_chars: int) -> str:
    """At most `max_chars`: a longer text loses its middle."""
    if len(text) <= max_chars:
        return text
    kept = max(2, max_chars - len(CUT_MARK))
    return text[: kept // 2] + CUT_MARK + text[len(text) - (kept - kept // 2) :]
