"""Scripted policies of the family `mend`: how a task is played by who knows the answer, and by who knows nothing.

They act through the same tools and the same harness as the policy (`episodes.scripted.spoken`).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from tidemill.core.errors import TaskError
from tidemill.core.records import Step, Task, ToolCall, Tree, Verifier
from tidemill.episodes.mend import PASSED, first_window
from tidemill.episodes.syntax import syntax_error
from tidemill.text.tokenizer import pieces
from tidemill.text.windows import edits_between

TRY_STEPS = 3
"""Of one try: undoing the last one, an edit, a test."""

WrongEdit = Callable[[str, int, int, random.Random], str | None]
"""Source, first and last line of the window, randomness → the source with one plausible change; None: no idea."""


@final
class NoOp:
    """Hands in at once: every task must refuse it."""

    def act(self, text: str) -> ToolCall:
        return _call("submit")


@final
class Demonstrator:
    """Edits, tests, reads the result; tries again where it failed, and hands in where it passed.

    With a verifier, each try is the gold version with `gold_probability`, else a plausible wrong edit, and the last
    try that the steps allow is the gold one: it persists, and never gives up early. With probability 1 it is the
    oracle. Without a verifier it is the blind agent that every figure is compared with.
    """

    def __init__(
        self,
        task: Task,
        repository: Tree,
        verifier: Verifier | None,
        *,
        gold_probability: float,
        seed: int,
        wrong_edit: WrongEdit | None = None,
    ) -> None:
        """`seed`: of the attempt. Raises `TaskError` where the verifier's gold version is another file."""
        if not 0 <= gold_probability <= 1:
            raise ValueError(f"gold_probability {gold_probability} is not between 0 and 1")
        path = str(task.data["path"])
        self._original = _file(task, repository, path)
        self._gold = None if verifier is None else _file(task, verifier.gold, path)
        self._gold_probability = gold_probability
        self._random = random.Random(f"{seed}/{task.id}")
        self._wrong_edit = wrong_edit or swapped_word
        self._start, self._num_lines = first_window(task)
        self._window_start = self._start
        self._steps_left = task.limits.max_steps
        self._current = self._original
        self._before: list[str] = []
        """The file before each edit that stands."""
        self._tried = {self._original}
        self._queue: list[ToolCall] = []
        self._pending: str | None = None
        self._is_tested = False

    def act(self, text: str) -> ToolCall:
        call = self._next(text.strip())
        self._steps_left -= 1
        self._is_tested = call.name == "test"
        return call

    def _next(self, seen: str) -> ToolCall:
        if self._is_tested and seen == PASSED:
            return _call("submit")
        if self._pending is not None:
            refused, content = seen.startswith(("refused", "error")), self._pending
            self._pending = None
            if refused:
                self._queue = []
                self._before.pop()
            else:
                self._current = content
        if not self._queue:
            if self._steps_left <= 1:
                return _call("submit")
            target = self._target()
            if target is None:
                return _call("submit")
            self._tried.add(target)
            self._queue = self._plan(target)
        call = self._queue.pop(0)
        if call.name == "edit":
            self._before.append(self._current)
            self._pending = self._after(call)
        elif call.name == "undo":
            self._current = self._before.pop()
        return call

    def _target(self) -> str | None:
        """The version to try next; None where there is nothing left to try."""
        is_last = self._steps_left < 2 * TRY_STEPS + 1
        if self._gold is not None and (is_last or self._random.random() < self._gold_probability):
            return None if self._gold in self._tried else self._gold
        last_line = self._start + self._num_lines - 1
        for _ in range(8):
            wrong = self._wrong_edit(self._original, self._start, last_line, self._random)
            if wrong is not None and wrong not in self._tried and wrong != self._gold and not syntax_error(wrong):
                return wrong
        return None if self._gold in self._tried else self._gold

    def _plan(self, target: str) -> list[ToolCall]:
        calls = [_call("undo") for _ in self._before]
        for line, old, new in edits_between(self._original, target):
            if not 0 <= line - self._window_start < self._num_lines:
                self._window_start = max(1, line - 2)
                calls.append(_call("read", start=self._window_start))
            calls.append(_call("edit", line=line - self._window_start + 1, old=old, new=new))
        return [*calls, _call("test")]

    def _after(self, call: ToolCall) -> str:
        """The file after this edit."""
        lines = self._current.split("\n")
        index = self._window_start + int(call.arguments["line"]) - 2
        lines[index] = lines[index].replace(str(call.arguments["old"]), str(call.arguments["new"]), 1)
        return "\n".join(lines)


def taken_back(steps: Sequence[Step]) -> list[int]:
    """Indices of the edits that an `undo` took back: mistakes that a demonstration shows, and should not teach."""
    standing: list[int] = []
    found: list[int] = []
    for index, step in enumerate(steps):
        for call, observation in zip(step.calls, step.observations, strict=False):  # malformed calls have some, too
            if call.name == "edit" and observation.error is None:
                standing.append(index)
            elif call.name == "undo" and observation.error is None:
                found.append(standing.pop())
    return sorted(found)


def _call(name: str, **arguments: str | int) -> ToolCall:
    return ToolCall(id="", name=name, arguments=arguments)


def _file(task: Task, tree: Tree, path: str) -> str:
    for file in tree.files:
        if file.path == path:
            return file.data.decode("utf-8")
    raise TaskError(f"task {task.id}: {path} is not among {[file.path for file in tree.files][:5]}")


_SWAPS: dict[str, tuple[str, ...]] = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "+": ("-",),
    "-": ("+",),
    "*": ("+", "//"),
    "/": ("//", "*"),
    "//": ("/", "%"),
    "+=": ("-=",),
    "-=": ("+=",),
    "and": ("or",),
    "or": ("and",),
    "is": ("is not",),
    "in": ("not in",),
    "True": ("False",),
    "False": ("True",),
    "None": ("0",),
    "min": ("max",),
    "max": ("min",),
    "any": ("all",),
    "all": ("any",),
    "append": ("extend",),
    "if": ("if not",),
    "return": ("return not",),
}


def swapped_word(source: str, first_line: int, last_line: int, rng: random.Random) -> str | None:
    """One operator, keyword, number or name of the window replaced by a near one: what a guess looks like."""
    places = _places(source, first_line, last_line)
    if not places:
        return None
    place = rng.choice(places)
    new = rng.choice(place.near)
    return None if new == place.word else _swapped(source, place, new)


def swapped_words(source: str, first_line: int, last_line: int) -> list[str]:
    """All that `swapped_word` can give, each once, in order of place."""
    found = [
        _swapped(source, place, new)
        for place in _places(source, first_line, last_line)
        for new in place.near
        if new != place.word
    ]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class _Place:
    """A word of the window, and what could stand there."""

    line: int
    """Its index."""
    number: int
    """Of the piece in it."""
    word: str
    near: Sequence[str]


def _places(source: str, first_line: int, last_line: int) -> list[_Place]:
    lines = source.split("\n")
    shown = {index: pieces(lines[index]) for index in range(first_line - 1, min(last_line, len(lines)))}
    names = sorted({piece for cut in shown.values() for piece in cut if piece.isidentifier()} - _SWAPS.keys())
    places = []
    for index, cut in shown.items():
        for number, piece in enumerate(cut):
            word = piece.strip()
            if word in _SWAPS:
                places.append(_Place(index, number, word, _SWAPS[word]))
            elif word.isdecimal():
                places.append(_Place(index, number, word, [str(max(0, int(word) + step)) for step in (-1, 1)]))
            elif word in names:
                places.append(_Place(index, number, word, names))
    return places


def _swapped(source: str, place: _Place, new: str) -> str:
    lines = source.split("\n")
    cut = pieces(lines[place.line])
    cut[place.number] = cut[place.number].replace(place.word, new, 1)
    lines[place.line] = "".join(cut)
    return "\n".join(lines)
