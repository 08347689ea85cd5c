"""Episodes as ATIF v1.8 documents (Agent Trajectory Interchange Format): JSON that other tools read."""

from collections.abc import Callable, Sequence
from typing import Any

from tidemill.core.records import Episode, Observation, Segment, Step, ToolCall
from tidemill.core.seams import ToolSpec
from tidemill.core.tools import function_schema

SCHEMA_VERSION = "ATIF-v1.8"


def atif(
    episode: Episode,
    *,
    decode: Callable[[Sequence[int]], str],
    tools: Sequence[ToolSpec],
    agent_version: str,
    model_name: str,
) -> dict[str, Any]:
    """One document per episode. `decode` turns prompt ids into text for people; the ids themselves are in `metrics`.

    The prompt of a later step is in its ids and in the observation before it, so that only the text that opens a
    segment becomes a step of its own.
    """
    steps: list[dict[str, Any]] = []
    for index, segment in enumerate(episode.segments):
        steps += _segment(segment, index, decode, model_name, len(steps))
    if not steps:
        steps = [{"step_id": 1, "source": "system", "message": "The attempt ended before the agent was asked."}]
    return {
        "schema_version": SCHEMA_VERSION,
        "session_id": episode.attempt_id,
        "trajectory_id": episode.attempt_id,
        "agent": {
            "name": "tidemill",
            "version": agent_version,
            "model_name": model_name,
            "tool_definitions": [function_schema(tool) for tool in tools],
        },
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(len(step["metrics"]["prompt_token_ids"]) for step in steps if "metrics" in step),
            "total_completion_tokens": sum(
                len(step["metrics"]["completion_token_ids"]) for step in steps if "metrics" in step
            ),
            "total_steps": len(steps),
        },
        "extra": {
            "task_id": episode.task_id,
            "group_id": episode.group_id,
            "outcome": episode.outcome,
            "reward": episode.reward,
            "rewards": episode.rewards,
            "measures": episode.measures,
            "harness_hash": episode.harness_hash,
            "reward_version": episode.reward_version,
        },
    }


def _segment(
    segment: Segment, index: int, decode: Callable[[Sequence[int]], str], model_name: str, num_before: int
) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    prompt_ids: list[int] = []
    for number, step in enumerate(segment.steps):
        new_ids = step.generation.prompt_ids.numpy().tolist()
        prompt_ids += new_ids
        if number == 0:
            steps.append(
                {
                    "step_id": num_before + 1,
                    "source": "user",
                    "message": decode(new_ids),
                    "extra": {"segment": index, "opened_by": segment.opened_by},
                }
            )
        sampled_ids = step.generation.token_ids.numpy().tolist()
        steps.append(_agent_step(step, num_before + len(steps) + 1, prompt_ids, sampled_ids, model_name))
        prompt_ids += sampled_ids
    return steps


def _agent_step(
    step: Step, step_id: int, prompt_ids: Sequence[int], sampled_ids: Sequence[int], model_name: str
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "step_id": step_id,
        "source": "agent",
        "message": step.text,
        "model_name": model_name,
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(sampled_ids),
            "prompt_token_ids": list(prompt_ids),
            "completion_token_ids": list(sampled_ids),
            "logprobs": step.generation.logprobs.numpy().tolist(),
        },
        "extra": {
            "policy_versions": step.generation.versions.numpy().tolist(),
            "stop_reason": step.generation.stop_reason,
        },
    }
    if step.calls:
        document["tool_calls"] = [_call(call) for call in step.calls]
    if step.observations:
        ids = {call.id for call in step.calls}
        document["observation"] = {"results": [_result(observation, ids) for observation in step.observations]}
    return document


def _call(call: ToolCall) -> dict[str, Any]:
    return {"tool_call_id": call.id, "function_name": call.name, "arguments": dict(call.arguments)}


def _result(observation: Observation, call_ids: set[str]) -> dict[str, Any]:
    """A result names its call only where the call could be parsed: the format asks for a call of the same step."""
    named = {"source_call_id": observation.call_id} if observation.call_id in call_ids else {}
    return {**named, "content": observation.text}
