"""A healthy package's own tests, studied in sandboxes: which are quick, what they reach, and which calls hold."""

from collections.abc import Sequence

from tidemill.core.checks import PYTEST_PRELOAD, new_nonce, parse_replay, replay_source, replay_stdin
from tidemill.core.errors import TaskError
from tidemill.core.records import Layer, Record
from tidemill.core.seams import SandboxLimits, SandboxTier
from tidemill.tasks.layout import Layout, module_name, support_files, tree
from tidemill.tasks.probe import (
    CallProbe,
    SuiteProbe,
    calls_source,
    calls_stdin,
    parse_calls,
    parse_suite,
    suite_source,
    suite_stdin,
)

MAX_TEST_S = 0.05
NUM_REPEATS = 3
MAX_RESULT_CHARS = 200
SUITE_TIMEOUT_S = 300.0
MIN_PASSING_SHARE = 0.5


class Suite(Record, frozen=True):
    tests: dict[str, tuple[str, ...]]
    """Id of a quick and steady test → functions that it reaches, as `path:qualname`."""
    calls: dict[str, list[CallProbe]]
    """Path of a module → calls over its names whose results are canonical and steady."""


async def study(name: str, layout: Layout, tier: SandboxTier, layer: Layer) -> Suite:
    """Raises `TaskError` where no test can be collected, or where too many fail on the healthy package."""
    probes = [await run_suite(layout, tier, layer, trace=trace) for trace in (True, True, False, False)]
    _check_health(name, probes[0])
    passing = [{test.id: test for test in probe.tests if test.status == "passed"} for probe in probes]
    tests = {
        id_: test.reached
        for id_, test in sorted(passing[0].items())
        if all(id_ in other for other in passing[1:]) and min(other[id_].seconds for other in passing[1:]) <= MAX_TEST_S
    }
    calls = {}
    grouped: dict[str, list[str]] = {}
    for key, expressions in sorted(probes[0].calls.items()):
        again = probes[1].calls.get(key, [])  # without addresses, times and folders of one run
        grouped.setdefault(key.split(":")[0], []).extend(item for item in expressions if item in again)
    for path, expressions in grouped.items():
        steady = await _steady_calls(layout, tier, layer, path, list(dict.fromkeys(expressions)))
        if steady:
            calls[path] = steady
    return Suite(tests=tests, calls=calls)


async def run_suite(layout: Layout, tier: SandboxTier, layer: Layer, *, trace: bool) -> SuiteProbe:
    """All tests of a package, once, in a fresh sandbox; with `trace`, what each of them reaches.

    Raises `TaskError` where the suite does not come to its end.
    """
    support = support_files(layout)
    files = [path for path in layout.tests if path not in support]
    workspace = tree(dict(layout.sources), dict(layout.data), dict(layout.tests))
    sandbox = await tier.open(workspace, layer, SandboxLimits(output_bytes=64 << 20, max_inodes=50_000))
    try:
        nonce = new_nonce()
        done = await sandbox.python(
            suite_source(),
            timeout_s=SUITE_TIMEOUT_S,
            preload=PYTEST_PRELOAD,
            stdin=suite_stdin(nonce, files, list(layout.sources), trace=trace),
        )
    finally:
        await sandbox.close()
    probe = parse_suite(done.stdout, nonce)
    if not probe.finished:
        last = probe.tests[-1].id if probe.tests else "the start"
        raise TaskError(f"the test suite did not come to its end ({done.status}, after {last})")
    return probe


def _check_health(name: str, probe: SuiteProbe) -> None:
    cause = f"; {probe.errors[0]}" if probe.errors else ""
    if not probe.tests:
        raise TaskError(f"{name}: not one test could be collected{cause}")
    bad = [test for test in probe.tests if test.status in ("failed", "missing")]
    if len(bad) > (1 - MIN_PASSING_SHARE) * len(probe.tests):
        raise TaskError(
            f"{name}: {len(bad)} of {len(probe.tests)} tests fail on the unchanged code, the first is {bad[0].id}"
            f"{cause}: mend them, or install what they need"
        )


async def _steady_calls(
    layout: Layout, tier: SandboxTier, layer: Layer, path: str, expressions: Sequence[str]
) -> list[CallProbe]:
    """Calls whose canonical result is the same in three sandboxes (three hash seeds)."""
    module = module_name(path)
    first: list[CallProbe] = []
    steady: list[bool] = []
    for index in range(NUM_REPEATS):
        sandbox = await tier.open(tree(dict(layout.sources), dict(layout.data)), layer, SandboxLimits())
        nonce = new_nonce()
        try:
            if index == 0:
                request = calls_stdin(nonce, module, list(layout.sources), expressions, cpu_s=20)
                done = await sandbox.python(calls_source(), timeout_s=60, stdin=request)
                first = parse_calls(done.stdout, nonce, expressions)
                steady = [_usable(probe) for probe in first]
            else:
                request = replay_stdin(nonce, module, [probe.expression for probe in first], cpu_s=20)
                done = await sandbox.python(replay_source(), timeout_s=60, stdin=request)
                again = parse_replay(done.stdout, nonce, len(first))
                steady = [
                    good and probe.result == result for good, probe, result in zip(steady, first, again, strict=True)
                ]
        finally:
            await sandbox.close()
    return [probe for good, probe in zip(steady, first, strict=True) if good]


def _usable(probe: CallProbe) -> bool:
    bad = probe.result.startswith(("refused:", "import failed:")) or " at 0x" in probe.result
    return not bad and len(probe.result) <= MAX_RESULT_CHARS
