"""From what a policy said to a checked tool call, or to an error that names what was wrong. Nothing is guessed."""

import re
from collections.abc import Sequence

from tidemill.core.records import Observation, ToolCall
from tidemill.core.seams import ToolSpec

_INTEGER = re.compile(r"-?[0-9]{1,9}")


def fault(call_id: str, kind: str, text: str) -> Observation:
    """An error for the policy to see. Kinds: `malformed`, `truncated`, `empty`, `unknown_tool`, `bad_arguments`,
    `duplicate`."""
    return Observation(call_id=call_id, text=f"error: {text}", error=kind)


def positional_call(
    call_id: str, name: str, values: Sequence[str], tools: Sequence[ToolSpec]
) -> ToolCall | Observation:
    """A call whose values stand in the order of the tool's parameters; optional ones may be left out at the end."""
    tool = _find(name, tools)
    if tool is None:
        return _unknown(call_id, name, tools)
    names = list(tool.parameters)
    if len(values) > len(names):
        return fault(call_id, "bad_arguments", f"{name} takes at most {len(names)} arguments, not {len(values)}")
    return named_call(call_id, name, list(zip(names[: len(values)], values, strict=True)), tools)


def named_call(
    call_id: str, name: str, arguments: Sequence[tuple[str, str | int]], tools: Sequence[ToolSpec]
) -> ToolCall | Observation:
    """A call with its arguments by name, in any order. A text in place of an integer must be one, in digits."""
    tool = _find(name, tools)
    if tool is None:
        return _unknown(call_id, name, tools)
    checked: dict[str, str | int] = {}
    for key, value in arguments:
        if key not in tool.parameters:
            return fault(call_id, "bad_arguments", f"{name} has no argument {key!r}")
        if key in checked:
            return fault(call_id, "bad_arguments", f"{name} got {key} twice")
        if tool.parameters[key] == "string":
            if not isinstance(value, str):
                return fault(call_id, "bad_arguments", f"{name} needs a text for {key}")
            checked[key] = value
        elif type(value) is int:
            checked[key] = value
        elif isinstance(value, str) and _INTEGER.fullmatch(value):
            checked[key] = int(value)
        else:
            return fault(call_id, "bad_arguments", f"{name} needs an integer for {key}")
    missing = [key for key in tool.required if key not in checked]
    if missing:
        return fault(call_id, "bad_arguments", f"{name} needs {', '.join(missing)}")
    return ToolCall(id=call_id, name=name, arguments=checked)


def without_duplicates(
    results: Sequence[ToolCall | Observation],
) -> tuple[tuple[ToolCall, ...], tuple[Observation, ...]]:
    """Calls and errors of one turn; a call under an id that the turn has used already becomes an error."""
    calls: list[ToolCall] = []
    errors: list[Observation] = []
    seen: set[str] = set()
    for result in results:
        if isinstance(result, Observation):
            errors.append(result)
        elif result.id in seen:
            errors.append(fault(result.id, "duplicate", f"two calls have the id {result.id}"))
        else:
            seen.add(result.id)
            calls.append(result)
    return tuple(calls), tuple(errors)


def _find(name: str, tools: Sequence[ToolSpec]) -> ToolSpec | None:
    return next((tool for tool in tools if tool.name == name), None)


def _unknown(call_id: str, name: str, tools: Sequence[ToolSpec]) -> Observation:
    if not name:
        return fault(call_id, "empty", "no tool was named")
    known = ", ".join(tool.name for tool in tools)
    return fault(call_id, "unknown_tool", f"no tool {name[:40]!r}; tools: {known}")
