"""The verdict on a patch. What the agent can write is never trusted (law 10).

1. A fresh sandbox holds the pristine snapshot, then the hidden tests and their configuration, then the patch's
   allow-listed files. Each test must be reported, and pass.
2. Those tests shared an interpreter with the patch, which can beat them from inside. Where they all passed, another
   fresh sandbox, without the tests and without pytest, replays calls that were recorded on the gold version; their
   results are compared here, on the host. The expected values never enter a sandbox.

Tests go first because most patches fail them, and are then done with one sandbox.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from tidemill.core.blobs import get_record
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
from tidemill.core.errors import SandboxFault, TaskError
from tidemill.core.records import Layer, Task, Tree, TreeFile, Verifier
from tidemill.core.seams import Blobs, SandboxLimits, SandboxTier, Vault
from tidemill.episodes.syntax import same_syntax


@dataclass(frozen=True, kw_only=True)
class Grade:
    solved: bool
    """Every expected test was reported and passed, and every replayed call gave the recorded result."""
    tests_passed: bool
    shown_passed: bool
    """The checks that the agent could run itself."""
    num_replays_equal: int | None
    """None where the tests failed, so that nothing was replayed."""
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
        timeout_s: float = 10.0,
    ) -> None:
        """`layers`: digest → layer. `timeout_s`: of all tests, and of all replays."""
        self._tier = tier
        self._vault = vault
        self._blobs = blobs
        self._layers = layers
        self._limits = limits or SandboxLimits()
        self._timeout_s = timeout_s

    async def grade(self, task: Task, patch: Mapping[str, bytes]) -> Grade:
        """Raises `TaskError`, `BlobError`, `SandboxFault` or `SandboxUnavailable` where no verdict can be given."""
        verifier, pristine, layer = self._resolve(task)
        allowed = {
            path: TreeFile(path=path, data=patch[path], executable=pristine[path].executable)
            for path in verifier.allowed_paths
            if path in patch and path in pristine
        }
        hidden = by_path(verifier.files)
        cpu_s: dict[str, float] = {}
        expected = [*verifier.fail_to_pass, *verifier.pass_to_pass]
        ids = list(dict.fromkeys([*expected, *task.shown_checks]))
        nonce = new_nonce()
        output = await self._run(
            overlay(pristine, hidden, allowed),
            layer,
            pytest_source(),
            pytest_stdin(nonce, ids, rewrite=False),
            preload=PYTEST_PRELOAD,
            without_patch=overlay(pristine, hidden),
            cpu_s=cpu_s,
            stage="grade_tests",
        )
        reports = parse_statuses(output, nonce, ids)
        passed = {id_ for id_, report in reports.items() if report.status == "passed"}
        tests_passed = bool(expected) and passed.issuperset(expected)
        num_equal = None
        if tests_passed:
            nonce = new_nonce()
            output = await self._run(
                overlay(pristine, allowed),
                layer,
                replay_source(),
                replay_stdin(nonce, verifier.module or "", [call.expression for call in verifier.calls]),
                without_patch=overlay(pristine),
                cpu_s=cpu_s,
                stage="grade_replay",
            )
            results = parse_replay(output, nonce, len(verifier.calls))
            num_equal = sum(call.expected == result for call, result in zip(verifier.calls, results, strict=True))
        return Grade(
            solved=tests_passed and num_equal == len(verifier.calls),
            tests_passed=tests_passed,
            shown_passed=passed.issuperset(task.shown_checks),
            num_replays_equal=num_equal,
            ast_equal=_ast_equal(verifier, pristine, allowed),
            statuses={id_: report.status for id_, report in reports.items()},
            ignored_paths=tuple(sorted(set(patch) - set(allowed))),
            cpu_s=cpu_s,
        )

    def matches_gold(self, task: Task, patch: Mapping[str, bytes]) -> bool:
        """Whether the patched files have the syntax trees of the gold version. Runs nothing."""
        verifier, pristine, _ = self._resolve(task)
        changed = {path: TreeFile(path=path, data=patch[path]) for path in verifier.allowed_paths if path in patch}
        return _ast_equal(verifier, pristine, changed)

    def _resolve(self, task: Task) -> tuple[Verifier, dict[str, TreeFile], Layer]:
        verifier = self._vault.verifier(task.id)
        if verifier.task_id != task.id:
            raise TaskError(f"the vault has the verifier of {verifier.task_id} under {task.id}: build the tasks again")
        if not verifier.calls or not verifier.module:
            raise TaskError(f"task {task.id} has no recorded calls to cross-check its tests with: build it again")
        if task.repository is None or task.layer is None or task.layer not in self._layers:
            raise TaskError(f"task {task.id} names no repository, or a layer that is not here: {task.layer}")
        return verifier, by_path(get_record(self._blobs, task.repository, Tree)), self._layers[task.layer]

    async def _run(
        self,
        tree: Tree,
        layer: Layer,
        source: str,
        stdin: bytes,
        *,
        without_patch: Tree,
        cpu_s: dict[str, float],
        stage: str,
        preload: Sequence[str] = (),
    ) -> bytes:
        """Standard output of a script in a fresh sandbox. A patch that takes its sandbox down twice, where the
        pristine files do not, has failed; it cannot turn its own failure into a fault of the machine."""
        for files in (tree, tree, without_patch):
            sandbox = await self._tier.open(files, layer, self._limits)
            try:
                result = await sandbox.python(source, timeout_s=self._timeout_s, preload=preload, stdin=stdin)
                return b"" if files is without_patch else result.stdout
            except SandboxFault:
                if files is without_patch:
                    raise
            finally:
                cpu_s[stage] = cpu_s.get(stage, 0.0) + sandbox.cpu_s
                await sandbox.close()
        raise AssertionError("unreachable")


def _ast_equal(verifier: Verifier, pristine: Mapping[str, TreeFile], changed: Mapping[str, TreeFile]) -> bool:
    return all(
        gold.path in pristine
        and same_syntax(
            changed.get(gold.path, pristine[gold.path]).data.decode("utf-8", "replace"),
            gold.data.decode("utf-8", "replace"),
        )
        for gold in verifier.gold.files
    )
