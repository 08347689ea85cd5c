"""The verdict on a patch. What the agent can write is never trusted (law 10).

1. A fresh sandbox holds the pristine snapshot, then the hidden tests and their configuration, then the patch's
   allow-listed files. Each test must be reported, and pass.
2. Those tests shared an interpreter with the patch, which can beat them from inside. Where they all passed, another
   fresh sandbox, without the tests and without pytest, replays calls that were recorded on the gold version; their
   results are compared here, on the host. The expected values never enter a sandbox.

Tests go first because most patches fail them, and are then done with one sandbox. Attempts at one task often end in
the same patch: its verdict is given once, and kept.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from tidemill.core.blobs import blob_hash, get_record
from tidemill.core.checks import (
    PYTEST_PRELOAD,
    new_nonce,
    parse_replay,
    parse_statuses,
    pytest_source,
    pytest_stdin,
    replay_source,
    replay_stdin,
)
from tidemill.core.errors import TaskError
from tidemill.core.records import Layer, Task, Tree, TreeFile, Verifier, digest
from tidemill.core.seams import Blobs, SandboxLimits, SandboxTier, Vault
from tidemill.episodes.syntax import same_syntax
from tidemill.episodes.turns import Turns


@dataclass(frozen=True, kw_only=True)
class Grade:
    solved: bool
    """Every expected test was reported and passed, and every replayed call gave the recorded result."""
    tests_passed: bool
    shown_passed: bool
    """The checks that the agent could run itself; False where the replay shows that the tests were beaten."""
    num_replays_equal: int | None
    """None where nothing was replayed: the tests failed, or there is no call."""
    ast_equal: bool
    statuses: dict[str, str]
    """Test id → status; for people, never shown to the agent."""
    ignored_paths: tuple[str, ...]
    """Paths of the patch that are not on the allow-list."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """`grade_tests`, `grade_replay`"""


def overlay(*layers: Mapping[str, TreeFile]) -> Tree:
    """Files of the later layers stand."""
    files: dict[str, TreeFile] = {}
    for layer in layers:
        files.update(layer)
    return Tree(files=tuple(files[path] for path in sorted(files)))


def by_path(tree: Tree) -> dict[str, TreeFile]:
    return {file.path: file for file in tree.files}


@final
class Grader:
    """Holds the vault. Whatever fails of its own raises: it is never a score."""

    def __init__(
        self,
        tier: SandboxTier,
        vault: Vault,
        blobs: Blobs,
        layers: Mapping[str, Layer],
        *,
        limits: SandboxLimits | None = None,
        timeout_s: float = 30.0,
        cpu_limit_s: int = 4,
        num_kept: int = 4096,
        cross_check: bool = True,
    ) -> None:
        """`layers`: digest → layer. `timeout_s`, `cpu_limit_s`: of all tests, and of all replays; CPU time, so that a
        busy machine changes no verdict. `num_kept`: verdicts that are kept; 0: none. `cross_check`: a verdict takes
        replayed calls as well; False in service, where no healthy version is known to record any on, so that the
        verdict is that of the tests alone and a person reads the diff."""
        self._tier = tier
        self._vault = vault
        self._blobs = blobs
        self._layers = layers
        self._limits = limits or SandboxLimits()
        self._timeout_s = timeout_s
        self._cpu_limit_s = cpu_limit_s
        self._num_kept = num_kept
        self._cross_check = cross_check
        self._kept: OrderedDict[str, Grade] = OrderedDict()
        self.turns = Turns()
        """Shared with the environments that this grader serves."""

    async def grade(self, task: Task, patch: Mapping[str, bytes]) -> Grade:
        """Raises `TaskError`, `BlobError`, `SandboxFault` or `SandboxUnavailable` where no verdict can be given."""
        verifier, pristine, layer = self._resolve(task)
        allowed = {
            path: TreeFile(path=path, data=patch[path], executable=pristine[path].executable)
            for path in verifier.allowed_paths
            if path in patch and path in pristine
        }
        ignored = tuple(sorted(set(patch) - set(allowed)))
        key = _key(task, allowed)
        async with self.turns.of(key):
            if key in self._kept:
                self._kept.move_to_end(key)
                return replace(self._kept[key], ignored_paths=ignored, cpu_s={})
            grade, is_final = await self._judge(task, verifier, pristine, allowed, layer)
            if is_final and self._num_kept:
                self._kept[key] = grade
                if len(self._kept) > self._num_kept:
                    self._kept.popitem(last=False)
        return replace(grade, ignored_paths=ignored)

    async def _judge(
        self,
        task: Task,
        verifier: Verifier,
        pristine: Mapping[str, TreeFile],
        allowed: Mapping[str, TreeFile],
        layer: Layer,
    ) -> tuple[Grade, bool]:
        """The grade, and whether it would be the same on another day (no script ran out of wall time)."""
        expected = [*verifier.fail_to_pass, *verifier.pass_to_pass]
        ids = list(dict.fromkeys([*expected, *task.shown_checks]))
        nonce = new_nonce()
        tests = await self._run(
            overlay(pristine, by_path(verifier.files), allowed),
            layer,
            pytest_source(),
            pytest_stdin(nonce, ids, rewrite=False, cpu_s=self._cpu_limit_s),
            preload=PYTEST_PRELOAD,
        )
        reports = parse_statuses(tests.stdout, nonce, ids)
        passed = {id_ for id_, report in reports.items() if report.status == "passed"}
        tests_passed = bool(expected) and passed.issuperset(expected)
        num_equal, is_final, cpu_s = None, tests.is_final, {"grade_tests": tests.cpu_s}
        if tests_passed and verifier.calls:
            nonce = new_nonce()
            expressions = [call.expression for call in verifier.calls]
            replay = await self._run(
                overlay(pristine, allowed),
                layer,
                replay_source(),
                replay_stdin(nonce, verifier.module or "", expressions, cpu_s=self._cpu_limit_s),
            )
            results = parse_replay(replay.stdout, nonce, len(verifier.calls))
            num_equal = sum(call.expected == text for call, text in zip(verifier.calls, results, strict=True))
            is_final, cpu_s["grade_replay"] = is_final and replay.is_final, replay.cpu_s
        solved = tests_passed and (num_equal or 0) == len(verifier.calls)
        grade = Grade(
            solved=solved,
            tests_passed=tests_passed,
            shown_passed=passed.issuperset(task.shown_checks) and (solved or not tests_passed),
            num_replays_equal=num_equal,
            ast_equal=_ast_equal(verifier, pristine, allowed),
            statuses={id_: report.status for id_, report in reports.items()},
            ignored_paths=(),
            cpu_s=cpu_s,
        )
        return grade, is_final

    def matches_gold(self, task: Task, patch: Mapping[str, bytes]) -> bool:
        """Whether the patched files have the syntax trees of the gold version. Runs nothing."""
        verifier, pristine, _ = self._resolve(task)
        changed = {path: TreeFile(path=path, data=patch[path]) for path in verifier.allowed_paths if path in patch}
        return _ast_equal(verifier, pristine, changed)

    def _resolve(self, task: Task) -> tuple[Verifier, dict[str, TreeFile], Layer]:
        verifier = self._vault.verifier(task.id)
        if verifier.task_id != task.id:
            raise TaskError(f"the vault has the verifier of {verifier.task_id} under {task.id}: build the tasks again")
        if self._cross_check and not (verifier.calls and verifier.module):
            raise TaskError(f"task {task.id} has no recorded calls to cross-check its tests with: build it again")
        if task.repository is None or task.layer is None or task.layer not in self._layers:
            raise TaskError(f"task {task.id} names no repository, or a layer that is not here: {task.layer}")
        return verifier, by_path(get_record(self._blobs, task.repository, Tree)), self._layers[task.layer]

    async def _run(
        self, tree: Tree, layer: Layer, source: str, stdin: bytes, *, preload: Sequence[str] = ()
    ) -> "_Output":
        """A script in a fresh sandbox, however it ended. A sandbox that the patch takes down is no fault of the
        machine: the tier tells the two apart."""
        sandbox = await self._tier.open(tree, layer, self._limits)
        try:
            result = await sandbox.python(source, timeout_s=self._timeout_s, preload=preload, stdin=stdin)
            return _Output(stdout=result.stdout, is_final=result.status == "ok", cpu_s=sandbox.cpu_s)
        finally:
            await sandbox.close()


@dataclass(frozen=True, kw_only=True)
class _Output:
    stdout: bytes
    is_final: bool
    cpu_s: float


def _key(task: Task, files: Mapping[str, TreeFile]) -> str:
    parts = [digest(task), *(f"{path}\0{blob_hash(files[path].data)}" for path in sorted(files))]
    return blob_hash("\0".join(parts).encode("utf-8", "surrogatepass"))


def _ast_equal(verifier: Verifier, pristine: Mapping[str, TreeFile], changed: Mapping[str, TreeFile]) -> bool:
    """False where no gold version is known."""
    return bool(verifier.gold.files) and all(
        gold.path in pristine
        and same_syntax(
            changed.get(gold.path, pristine[gold.path]).data.decode("utf-8", "replace"),
            gold.data.decode("utf-8", "replace"),
        )
        for gold in verifier.gold.files
    )
