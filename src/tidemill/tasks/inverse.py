"""The mutations read backwards: what might have stood here before a fault was planted. For agents that only guess.

Guesses are made generously (an operator for every other one, a `not` before every expression, …), and kept where an
operator of `operators`, let loose on the guess, gives the source back. So this is exact by construction.
"""

import ast
import re
from collections.abc import Iterator

from tidemill.core.errors import TaskError
from tidemill.tasks.operators import CALLS, MAX_SPAN_CHARS, apply, sites
from tidemill.tasks.spans import Text, parse

UNGUESSABLE = frozenset({"removed_line"})
"""Nobody can guess a whole line."""

_KINDS = (
    ("<", "<=", ">", ">=", "==", "!=", "is", "is not", "in", "not in"),
    ("+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^"),
    ("+=", "-="),
    ("and", "or"),
)
_OPERATOR = re.compile(r"\bis\s+not\b|\bnot\s+in\b|\b(?:is|in|and|or)\b|<=|>=|==|!=|\*\*|//|<<|>>|\+=|-=|[-+*/%<>&|^]")
_WORDS: dict[str, list[str]] = {}
for _name, _other in CALLS.items():
    _WORDS.setdefault(_other, []).append(_name)
_WORD = re.compile(rf"\b(?:{'|'.join(sorted(_WORDS))})\b")
_OFF_BY_ONE = re.compile(r"\b(\w+) [-+] 1\b")

_Guess = tuple[int, int, str]
"""Start, end, what is put there."""


def inverses(source: str, first_line: int, last_line: int) -> list[str]:
    """Versions of `source` that one fault inside these lines (from 1, both included) turns into `source`.

    Distinct, in order of place. Faults that nobody can guess are left out: see `UNGUESSABLE`. Raises `TaskError` where
    the source is no Python.
    """
    text = Text(source)
    start, end = text.starts[first_line - 1], text.starts[min(last_line, len(text.lines))]
    head = "if 1:\n" if source[start : start + 1] in (" ", "\t") else ""
    part = head + source[start:end]  # a whole file for each of hundreds of guesses would be slow
    try:
        parse(part)
        before, after = source[:start], source[end:]
        found = _inverses(part, len(head), len(part))
    except TaskError:
        before, head, after = "", "", ""
        found = _inverses(source, start, end)
    return [before + version[len(head) :] + after for version in found]


def _inverses(source: str, start: int, end: int) -> list[str]:
    tree = ast.dump(parse(source))
    guesses = sorted({guess for guess in _guesses(source) if start <= guess[0] and guess[1] <= end})
    versions = (source[:a] + new + source[b:] for a, b, new in guesses)
    return [version for version in dict.fromkeys(versions) if version != source and _leads_to(version, source, tree)]


def _leads_to(version: str, source: str, tree: str) -> bool:
    """Whether a fault in `version` gives `source`, which has this syntax tree."""
    try:
        if ast.dump(parse(version)) == tree:
            return False
        found = sites(version, verify=False)
    except TaskError:
        return False
    return any(fault.operator not in UNGUESSABLE and apply(version, fault) == source for fault in found)


def _guesses(source: str) -> Iterator[_Guess]:
    for fault in sites(source, verify=False):  # most operators undo each other
        yield fault.start, fault.end, fault.new
    for match in _OPERATOR.finditer(source):
        word = " ".join(match[0].split())
        for kind in _KINDS:
            if word in kind:
                yield from ((match.start(), match.end(), other) for other in kind if other != word)
    for match in _WORD.finditer(source):
        yield from ((match.start(), match.end(), other) for other in _WORDS[match[0]])
    for match in _OFF_BY_ONE.finditer(source):
        yield match.start(), match.end(), match[1]
    text = Text(source)
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.expr):
            start, end = text.span(node)
            old = source[start:end]
            if "\n" not in old and len(old) <= MAX_SPAN_CHARS:
                yield from ((start, end, form.format(old)) for form in ("not {}", "not ({})", "-{}", "-({})"))
