"""A tool as others write it down."""

from typing import Any

from tidemill.core.seams import ToolSpec


def function_schema(tool: ToolSpec) -> dict[str, Any]:
    """As JSON schema, in the envelope of OpenAI-compatible APIs."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": {
                "type": "object",
                "properties": {name: {"type": kind} for name, kind in tool.parameters.items()},
                "required": list(tool.required),
            },
        },
    }
