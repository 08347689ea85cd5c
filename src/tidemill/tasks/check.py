"""Is a task what it says? Its fault breaks the tests and the calls, and its repair mends all of them, here and now."""

import asyncio
import random
from collections.abc import Sequence

from tidemill.core.checks import (
    PYTEST_PRELOAD,
    TestReport,
    new_nonce,
    parse_replay,
    parse_statuses,
    pytest_source,
    pytest_stdin,
    replay_source,
    replay_stdin,
)
from tidemill.core.records import Layer, Record, Task, Tree, Verifier
from tidemill.core.seams import SandboxLimits, SandboxTier, Vault
from tidemill.tasks.folder import TaskSet

RUN_TIMEOUT_S = 60.0


class Finding(Record, frozen=True):
    """Something wrong with a task."""

    task_id: str
    problem: str


class Trial(Record, frozen=True):
    """What a verifier says of one state of a workspace."""

    reports: dict[str, TestReport]
    num_calls: int
    num_equal_calls: int

    @property
    def solved(self) -> bool:
        return all(item.status == "passed" for item in self.reports.values()) and self.num_calls == self.num_equal_calls


async def check(
    taskset: TaskSet, vault: Vault, tier: SandboxTier, *, sample: int = 20, seed: int = 0, num_sandboxes: int = 2
) -> list[Finding]:
    """Findings of a random sample of a task set (all of it where `sample` is 0); none is good."""
    tasks = list(taskset.tasks)
    if 0 < sample < len(tasks):
        tasks = random.Random(seed).sample(tasks, sample)
    gate = asyncio.Semaphore(num_sandboxes)

    async def one(task: Task) -> list[Finding]:
        async with gate:
            return await check_task(task, taskset, vault, tier)

    return [finding for found in await asyncio.gather(*(one(task) for task in tasks)) for finding in found]


async def check_task(task: Task, taskset: TaskSet, vault: Vault, tier: SandboxTier) -> list[Finding]:
    verifier = vault.verifier(task.id)
    workspace = taskset.workspace(task)
    layer = taskset.layer(task)
    faulty = await try_patch(workspace, layer, verifier, tier, None)
    mended = await try_patch(workspace, layer, verifier, tier, verifier.gold)
    problems = _problems(task, workspace, verifier, faulty, mended)
    return [Finding(task_id=task.id, problem=problem) for problem in problems]


async def try_patch(workspace: Tree, layer: Layer, verifier: Verifier, tier: SandboxTier, patch: Tree | None) -> Trial:
    """The verdict on a workspace with a patch, in a fresh sandbox: calls first, while pytest is absent."""
    box = await tier.open(workspace, layer, SandboxLimits())
    try:
        await box.write(verifier.files)
        if patch is not None:
            allowed = tuple(file for file in patch.files if file.path in verifier.allowed_paths)
            await box.write(Tree(files=allowed))
        nonce = new_nonce()
        request = replay_stdin(nonce, verifier.module or "", [call.expression for call in verifier.calls])
        done = await box.python(replay_source(), timeout_s=RUN_TIMEOUT_S, stdin=request)
        results = parse_replay(done.stdout, nonce, len(verifier.calls))
        equal = sum(call.expected == text for call, text in zip(verifier.calls, results, strict=True))
        ids = [*verifier.fail_to_pass, *verifier.pass_to_pass]
        nonce = new_nonce()
        request = pytest_stdin(nonce, ids, rewrite=False)
        done = await box.python(pytest_source(), timeout_s=RUN_TIMEOUT_S, preload=PYTEST_PRELOAD, stdin=request)
        return Trial(
            reports=parse_statuses(done.stdout, nonce, ids), num_calls=len(verifier.calls), num_equal_calls=equal
        )
    finally:
        await box.close()


def _problems(task: Task, workspace: Tree, verifier: Verifier, faulty: Trial, mended: Trial) -> Sequence[str]:
    problems: list[str] = []
    for id_ in verifier.fail_to_pass:
        if faulty.reports[id_].status == "passed":
            problems.append(f"{id_} passes with the fault in place")
    for id_ in verifier.pass_to_pass:
        if faulty.reports[id_].status != "passed":
            problems.append(f"{id_} does not pass with the fault in place: {faulty.reports[id_].status}")
    if faulty.num_equal_calls == faulty.num_calls:
        problems.append("no recorded call tells the fault from health")
    for id_, report in mended.reports.items():
        if report.status != "passed":
            problems.append(f"{id_} is {report.status} on the healthy version: {report.message[:200]}")
    if mended.num_equal_calls != mended.num_calls:
        problems.append(f"{mended.num_calls - mended.num_equal_calls} recorded calls differ on the healthy version")
    if not verifier.fail_to_pass or not verifier.pass_to_pass or len(verifier.calls) < 2:
        problems.append("needs a test that fails, one that passes, and two recorded calls")
    if not set(task.shown_checks) <= set(verifier.fail_to_pass):
        problems.append("a shown check is none of the failing tests")
    gold = {file.path: file.data for file in verifier.gold.files}
    if any(gold.get(file.path) == file.data for file in workspace.files):
        problems.append("the workspace holds the healthy file")
    return problems
