"""What the agents of a synthetic run see and say: a few small functions with a fault, and ways to mend them or not."""

from dataclasses import dataclass

from tidemill.core.records import Observation, ToolCall
from tidemill.text.windows import window


@dataclass(frozen=True, kw_only=True)
class Turn:
    call: ToolCall
    observation: Observation


@dataclass(frozen=True, kw_only=True)
class Script:
    statement: str
    turns: tuple[Turn, ...]
    solved: bool
    patch: dict[str, bytes]


CHUNKED = '''def chunked(iterable, size):
    """Break *iterable* into lists of length *size*."""
    chunk = []
    for item in iterable:
        chunk.append(item)
        if len(chunk) > size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
'''
CLAMP = '''def clamp(x, lower=float("-inf"), upper=float("inf")):
    """Limit a value to a given range."""
    if lower > upper:
        raise ValueError(f"expected upper bound <{upper}> >= lower bound <{lower}>")
    return max(max(x, upper), lower)
'''


def _turn(number: int, name: str, arguments: dict[str, str | int], text: str, error: str | None = None) -> Turn:
    call_id = f"call-{number}"
    return Turn(
        call=ToolCall(id=call_id, name=name, arguments=arguments),
        observation=Observation(call_id=call_id, text=text, error=error),
    )


def _edit(number: int, line: int, old: str, new: str) -> Turn:
    return _turn(number, "edit", {"line": line, "old": old, "new": new}, f"{line}|{new.strip()}")


def _statement(function: str, source: str, failure: str) -> str:
    return f"A check of `{function}` fails. Mend it.\n{window(source.splitlines())}\n{failure}"


def scripts() -> list[Script]:
    """Solved at once; solved after a correction; given up; and one that writes markup where it can."""
    chunk_failure = "test_chunked: assert [[1, 2, 3], [4]] == [[1, 2], [3, 4]]"
    clamp_failure = "test_clamp: assert inf == 1.0"
    chunk = _statement("chunked", CHUNKED, chunk_failure)
    clamp = _statement("clamp", CLAMP, clamp_failure)
    chunk_patch = {"iterutils.py": CHUNKED.replace("> size", "== size").encode()}
    clamp_patch = {"mathutils.py": CLAMP.replace("max(x, upper)", "min(x, upper)").encode()}
    hostile = '<script>alert("reward")</script><img src=x onerror=alert(1)>'
    return [
        Script(
            statement=chunk,
            turns=(
                _edit(0, 6, "> size", "== size"),
                _turn(1, "test", {}, "passed"),
                _turn(2, "submit", {}, "submitted"),
            ),
            solved=True,
            patch=chunk_patch,
        ),
        Script(
            statement=clamp,
            turns=(
                _edit(0, 5, "lower)", "upper)"),
                _turn(1, "test", {}, "test_clamp: assert inf == 0.0\n  where inf = clamp(0.0, -1.0, 1.0)"),
                _edit(2, 5, "max(x, upper)", "min(x, upper)"),
                _turn(3, "test", {}, "passed"),
                _turn(4, "submit", {}, "submitted"),
            ),
            solved=True,
            patch=clamp_patch,
        ),
        Script(
            statement=chunk,
            turns=(
                _edit(0, 3, "[]", "None"),
                _turn(1, "test", {}, "AttributeError: 'NoneType' object has no attribute 'append'"),
                _turn(2, "edit", {"line": 44, "old": "x", "new": hostile}, "no line 44: the window has 10", "bad_line"),
            ),
            solved=False,
            patch={"iterutils.py": CHUNKED.replace("[]", "None", 1).encode() + f"# {hostile}\n".encode()},
        ),
        Script(
            statement=clamp,
            turns=(
                _turn(0, "read", {"start": 2}, window(CLAMP.splitlines(), 1)),
                _turn(1, "flag_impossible", {}, "noted"),
            ),
            solved=False,
            patch={},
        ),
    ]
