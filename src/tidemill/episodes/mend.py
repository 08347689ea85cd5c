"""Mending a fault in a real repository, through a window on one file.

What the agent edits lives on the host; a sandbox is opened for the first `test`, gets the edited files, and runs the
shown checks. So the patch is what was edited, and nothing that code inside the sandbox can write.

`task.data` holds `path` (the file that may be edited), `first_line` and `last_line` (the window at the start, from 1),
and `failure` (what the first failing check says), which is found by running the shown checks where it is absent.
"""

import hashlib
import re
import signal
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import final

import msgspec

from tidemill.core.blobs import get_record
from tidemill.core.checks import (
    PYTEST_PRELOAD,
    failure_text,
    new_nonce,
    parse_statuses,
    pytest_source,
    pytest_stdin,
)
from tidemill.core.errors import SandboxError, SandboxFault, TaskError
from tidemill.core.records import Layer, Outcome, Task, ToolCall, Tree, TreeFile
from tidemill.core.seams import Blobs, Feedback, Sandbox, SandboxLimits, SandboxTier, Score, Spans, ToolSpec
from tidemill.episodes.grading import Grader
from tidemill.episodes.syntax import syntax_error
from tidemill.text.windows import MAX_WINDOW_LINES, numbered, window

MEND_VERSION = "2"
PASSED = "passed"
"""What `test` says where all shown checks pass."""
MAX_GREP_HITS = 8
MAX_FILE_CHARS = 2_000_000

TOOLS = (
    ToolSpec(
        name="read",
        description="Move the window to a line of the file; without one, show it again.",
        parameters={"start": "integer"},
        required=(),
    ),
    ToolSpec(
        name="grep",
        description="Lines of the repository's Python files that hold this text, taken literally.",
        parameters={"pattern": "string"},
        required=("pattern",),
    ),
    ToolSpec(
        name="edit",
        description="Replace the first occurrence of a text on a numbered line of the window.",
        parameters={"line": "integer", "old": "string", "new": "string"},
        required=("line", "old", "new"),
    ),
    ToolSpec(name="undo", description="Take the last edit back.", parameters={}, required=()),
    ToolSpec(name="test", description="Run the checks.", parameters={}, required=()),
    ToolSpec(name="submit", description="Hand the work in.", parameters={}, required=()),
    ToolSpec(name="flag_impossible", description="Say that it cannot be done.", parameters={}, required=()),
)


def first_window(task: Task) -> tuple[int, int]:
    """First line, from 1, and number of lines of what the agent sees at the start."""
    first = int(str(task.data.get("first_line", 1)))
    last = int(str(task.data.get("last_line", first + MAX_WINDOW_LINES - 1)))
    if not 1 <= first <= last:
        raise TaskError(f"task {task.id} has a window from line {first} to {last}: build it again")
    return first, min(MAX_WINDOW_LINES, last - first + 1)


@dataclass(frozen=True, kw_only=True)
class MendRewards:
    """Weights of the parts. None can be earned, and no loss avoided, by ending early."""

    solved: float = 1.0
    """The verdict, however the episode ended."""
    submitted: float = 0.1
    """Handed in, and solved."""
    shown: float = 0.1
    """The shown checks pass in grading."""
    tries: float = 0.3
    """Different edits that were accepted and then tested, as a share of `num_tries`; all of it where solved."""
    num_tries: int = 3

    def __post_init__(self) -> None:
        weights = (self.solved, self.submitted, self.shown, self.tries)
        if min(weights) < 0 or self.num_tries < 1:
            raise ValueError(f"weights {weights} must not be negative, num_tries {self.num_tries} at least 1")
        if self.shown + self.tries >= self.solved:
            raise ValueError(f"solved {self.solved} must outweigh shown + tries {self.shown + self.tries}")

    @property
    def version(self) -> str:
        """Digest of the weights and of the rule."""
        content = msgspec.json.encode([MEND_VERSION, asdict(self)], order="deterministic")
        return f"mend-{hashlib.sha256(content).hexdigest()[:16]}"


@final
class MendEnvironment:
    """`core.seams.Environment`: one attempt at one task of the family `mend`."""

    tools = TOOLS

    def __init__(
        self,
        tier: SandboxTier,
        *,
        blobs: Blobs,
        layers: Mapping[str, Layer],
        grader: Grader,
        rewards: MendRewards | None = None,
        failures: MutableMapping[str, str] | None = None,
        limits: SandboxLimits | None = None,
        test_timeout_s: float = 30.0,
        test_cpu_limit_s: int = 4,
    ) -> None:
        """`layers`: digest → layer. `failures`: what the shown checks said of a version of the file; give the same
        dictionary to all attempts, which make the same edits again and again, and most tests need no sandbox."""
        self._tier, self._blobs, self._layers, self._grader = tier, blobs, layers, grader
        self._rewards = rewards or MendRewards()
        self.reward_version = self._rewards.version
        self._failures = failures if failures is not None else {}
        self._limits = limits or SandboxLimits()
        self._test_timeout_s, self._test_cpu_limit_s = test_timeout_s, test_cpu_limit_s
        self._sandbox: Sandbox | None = None
        self._cpu_s = {"sandbox": 0.0}
        self._is_written = True
        self._is_tested = False
        self._num_tests = 0
        self._num_refused = 0
        self._num_edits = 0
        self._standing: list[tuple[str, str, int, int]] = []
        """Of each edit that stands: what it did; content, window's start and lines before it."""
        self._tested: set[str] = set()
        self._first_edit: str | None = None

    # --- the seam --------------------------------------------------------------------------------------------

    async def open(self, task: Task) -> str:
        if task.repository is None or task.layer is None or task.layer not in self._layers:
            raise TaskError(f"task {task.id} names no repository, or a layer that is not here: {task.layer}")
        self._task = task
        self._tree = get_record(self._blobs, task.repository, Tree)
        self._path = str(task.data["path"])
        file = next((file for file in self._tree.files if file.path == self._path), None)
        if file is None:
            raise TaskError(f"task {task.id} wants {self._path} mended, which its repository does not hold")
        self._original = self._content = file.data.decode("utf-8")
        first_line, self._num_lines = first_window(task)
        self._start = first_line - 1
        failure = str(task.data.get("failure", "")) or await self._checked()
        head = task.statement if self._path in task.statement else f"{task.statement}\n{self._path}"
        return f"{head}\n{self._window()}\n{self._placed(failure)}"

    async def call(self, call: ToolCall) -> Feedback:
        match call.name:
            case "read":
                return self._read(call.arguments.get("start"))
            case "grep":
                return self._grep(str(call.arguments["pattern"]))
            case "edit":
                arguments = call.arguments
                return self._edit(int(arguments["line"]), str(arguments["old"]), str(arguments["new"]))
            case "undo":
                return self._undo()
            case "test":
                return await self._test()
            case "submit":
                return Feedback(text="", ends="submitted")
            case "flag_impossible":
                return Feedback(text="", ends="flagged_impossible")
        return Feedback(text=f"error: no tool {call.name}", error="unknown_tool")

    async def score(self, outcome: Outcome) -> Score:
        patch = self._patch(self._content)
        grade = await self._grader.grade(self._task, patch)
        weights = self._rewards
        share = 1.0 if grade.solved else min(1.0, len(self._tested) / weights.num_tries)
        first = self._first_edit is not None and self._grader.matches_gold(self._task, self._patch(self._first_edit))
        return Score(
            rewards={
                "solved": weights.solved * grade.solved,
                "submitted": weights.submitted * (grade.solved and outcome == "submitted"),
                "shown": weights.shown * grade.shown_passed,
                "tries": weights.tries * share,
            },
            measures={
                "solved": float(grade.solved),
                "tests_passed": float(grade.tests_passed),
                "shown_passed": float(grade.shown_passed),
                "ast_equal": float(grade.ast_equal),
                "first_edit_correct": float(first),
                "num_tests": float(self._num_tests),
                "num_edits": float(self._num_edits),
                "num_edits_refused": float(self._num_refused),
                "tested_before_submit": float(outcome == "submitted" and self._is_tested),
            },
            verdict=grade.statuses,
            patch=patch,
            cpu_s={**self._cpu(), **grade.cpu_s},
        )

    async def close(self) -> None:
        await self._drop_sandbox()

    # --- tools -----------------------------------------------------------------------------------------------

    def _read(self, start: str | int | None) -> Feedback:
        lines = self._content.split("\n")
        if start is not None:
            if not 1 <= int(start) <= len(lines):
                return Feedback(text=f"error: the file has lines 1 to {len(lines)}", error="bad_arguments")
            self._start = int(start) - 1
        return Feedback(text=self._window())

    def _grep(self, pattern: str) -> Feedback:
        if not pattern:
            return Feedback(text="error: an empty text is everywhere", error="bad_arguments")
        hits: list[str] = []
        for file in self._tree.files:
            if file.path.endswith(".py"):
                content = self._content if file.path == self._path else file.data.decode("utf-8", "replace")
                if pattern in content:
                    hits += [
                        f"{file.path}:{number}|{line.strip()}"
                        for number, line in enumerate(content.split("\n"), 1)
                        if pattern in line
                    ]
        more = f"\nand {len(hits) - MAX_GREP_HITS} more" if len(hits) > MAX_GREP_HITS else ""
        return Feedback(text="\n".join(hits[:MAX_GREP_HITS]) + more if hits else "nothing found")

    def _edit(self, line: int, old: str, new: str) -> Feedback:
        lines = self._content.split("\n")
        index = self._start + line - 1
        if not 1 <= line <= self._num_lines or index >= len(lines):
            shown = min(self._num_lines, len(lines) - self._start)
            return self._refused(f"the window has lines 1 to {shown}")
        if not old:
            return self._refused("old is empty")
        if old == new:
            return self._refused("old and new are the same")
        if old not in lines[index]:
            return self._refused(f"not on the line:\n{numbered([lines[index]], line)}")
        changed = lines[index].replace(old, new, 1).split("\n")
        content = "\n".join([*lines[:index], *changed, *lines[index + 1 :]])
        if len(content) > MAX_FILE_CHARS:
            return self._refused("the file would be too long")
        step = hashlib.sha256(f"{self._content}\0{content}".encode("utf-8", "surrogatepass")).hexdigest()
        if any(step == made for made, *_ in self._standing):
            return self._refused("this edit was made before")
        fault = syntax_error(content)
        if fault is not None:
            return self._refused(f"it would leave a syntax error: {self._relative(fault)}")
        self._num_edits += 1
        self._standing.append((step, self._content, self._start, self._num_lines))
        self._content, self._is_written, self._is_tested = content, False, False
        self._num_lines = min(MAX_WINDOW_LINES, self._num_lines + len(changed) - 1)
        if self._first_edit is None:
            self._first_edit = content
        return Feedback(text=numbered(changed, line))

    def _undo(self) -> Feedback:
        if not self._standing:
            return self._refused("there is no edit to take back")
        _, self._content, self._start, self._num_lines = self._standing.pop()
        self._is_written, self._is_tested = False, self._version() in self._tested
        return Feedback(text="taken back")

    def spans(self) -> Spans | None:
        """Lines of the window that hold anything."""
        shown = self._content.split("\n")[self._start : self._start + self._num_lines]
        lines = {number: line for number, line in enumerate(shown, 1) if line.strip()}
        return Spans(tool="edit", lines=lines) if lines else None

    def _refused(self, reason: str) -> Feedback:
        self._num_refused += 1
        return Feedback(text=f"refused: {reason}", error="refused")

    def _relative(self, fault: str) -> str:
        """The line of a syntax error, as the window counts it."""
        head, _, message = fault.partition(": ")
        if head.startswith("line ") and head[5:].isdigit():
            return f"line {int(head[5:]) - self._start}: {message}"
        return fault

    async def _test(self) -> Feedback:
        self._num_tests += 1
        self._is_tested = True
        if self._content != self._original:
            self._tested.add(self._version())
        return Feedback(text=self._placed(await self._checked()))

    def _version(self) -> str:
        return hashlib.sha256(self._content.encode("utf-8", "surrogatepass")).hexdigest()

    def _placed(self, failure: str) -> str:
        """A failure in the window's file, at the line that the window shows it under."""

        def place(match: re.Match[str]) -> str:
            line = int(match[1]) - self._start
            return f"(at line {line})" if 1 <= line <= self._num_lines else match[0]

        return re.sub(rf"\(at {re.escape(self._path)}:(\d{{1,7}})\)", place, failure)

    # --- the sandbox -----------------------------------------------------------------------------------------

    async def _checked(self) -> str:
        """What the shown checks say of the file as it is now."""
        ids = self._task.shown_checks
        if not ids:
            return "no checks"
        version = self._content.encode("utf-8")
        key = hashlib.sha256(f"{self._task.repository}\0{self._path}\0{ids}\0".encode() + version).hexdigest()
        async with self._grader.turns.of(key):
            if key not in self._failures:
                text, is_final = await self._run_checks(ids)
                if not is_final:
                    return text
                self._failures[key] = text
        return self._failures[key]

    async def _run_checks(self, ids: Sequence[str]) -> tuple[str, bool]:
        """What they say, and whether they would say the same on another day."""
        sandbox = await self._written_sandbox()
        nonce = new_nonce()
        result = await sandbox.python(
            pytest_source(),
            timeout_s=self._test_timeout_s,
            preload=PYTEST_PRELOAD,
            stdin=pytest_stdin(nonce, ids, cpu_s=self._test_cpu_limit_s),
        )
        if result.status == "killed":  # by the code under test: the next test gets another sandbox
            await self._drop_sandbox()
        if result.status != "ok":
            return f"failed: {result.status}", False
        is_out_of_time = result.exit_code in (-signal.SIGXCPU, -signal.SIGKILL)
        return "failed: timeout" if is_out_of_time else failure_text(parse_statuses(result.stdout, nonce, ids)), True

    async def _written_sandbox(self) -> Sandbox:
        """A live sandbox with the file as it is edited now."""
        sandbox = await self._live_sandbox()
        if self._is_written:
            return sandbox
        files = Tree(files=(TreeFile(path=self._path, data=self._content.encode("utf-8")),))
        try:
            await sandbox.write(files)
        except SandboxFault:
            raise
        except SandboxError:  # earlier code has filled or changed the workspace: that is no fault of the machine
            await self._drop_sandbox()
            sandbox = await self._live_sandbox()
            await sandbox.write(files)
        self._is_written = True
        return sandbox

    async def _live_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            layer = self._layers[str(self._task.layer)]
            self._sandbox = await self._tier.open(self._tree, layer, self._limits)
            self._is_written = self._content == self._original
        return self._sandbox

    async def _drop_sandbox(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self._cpu_s["sandbox"] += sandbox.cpu_s
            await sandbox.close()

    def _cpu(self) -> dict[str, float]:
        live = self._sandbox.cpu_s if self._sandbox is not None else 0.0
        return {"sandbox": self._cpu_s["sandbox"] + live}

    def _patch(self, content: str) -> dict[str, bytes]:
        return {} if content == self._original else {self._path: content.encode("utf-8")}

    def _window(self) -> str:
        return window(self._content.split("\n"), self._start, self._num_lines)
