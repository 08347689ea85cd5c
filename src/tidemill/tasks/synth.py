"""Task synthesis: small faults in functions of a real package, each proved by the package's own tests.

A fault becomes a task only if, in a sandbox: at least one test goes from pass to fail, at least one other test that
reaches the function still passes, at least one recorded call gives another result (so that a verdict can be
cross-checked where pytest is absent), nothing runs out of time, the healthy version passes, and all of it holds
again in another sandbox. (SWE-smith's rule, with calls and repeats added.)
"""

import ast
import asyncio
import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

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
from tidemill.core.errors import TaskError
from tidemill.core.records import Layer, Tree
from tidemill.core.seams import Sandbox, SandboxLimits, SandboxTier
from tidemill.tasks.build import build, fingerprint, shown_checks, test_files
from tidemill.tasks.layout import Layout, module_name, tree
from tidemill.tasks.manifest import (
    FunctionEntry,
    Manifest,
    TaskEntry,
    best_split_seed,
    layer_of,
    split_of,
)
from tidemill.tasks.operators import Mutation, apply, sites
from tidemill.tasks.packages import PackagePin
from tidemill.tasks.spans import FunctionNode, FunctionSpan, functions, parse
from tidemill.tasks.suite import Suite, study

RUN_TIMEOUT_S = 60.0
_HARD = ("removed_line", "swapped_arguments")
"""Common, and longer to repair: one of each per function."""
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SynthesisConfig:
    """How many tasks, and of which functions."""

    seed: int = 1
    max_per_function: int = 4
    max_per_package: int = 200
    max_functions: int = 140
    """Functions tried per package, by hash, where it has more that would do."""
    max_tries_per_function: int = 14
    """Faults that are run; most of the others would only repeat their kind."""
    max_function_lines: int = 40
    max_function_chars: int = 1200
    max_tests: int = 12
    """Tests that watch one function; those that reach the least beside it are taken."""
    max_calls: int = 5
    num_sandboxes: int = 2

    def __post_init__(self) -> None:
        for name in ("max_per_function", "max_per_package", "max_functions", "max_tries_per_function", "num_sandboxes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: must be at least 1")
        for name in ("max_tests", "max_calls"):
            if getattr(self, name) < 2:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: must be at least 2, one that fails and one that holds"
                )


@dataclass(frozen=True)
class _Found:
    """A fault that holds."""

    mutation: Mutation
    fail: tuple[int, ...]
    differing: frozenset[int]


async def synthesize(
    name: str,
    materials: Sequence[tuple[PackagePin, Layout]],
    tier: SandboxTier,
    config: SynthesisConfig,
    progress: Progress = lambda line: None,
) -> Manifest:
    """The manifest of a task set. Equal packages and config give an equal manifest.

    Raises `TaskError` where a package's tests do not pass, or where not one fault of any function holds.
    """
    entries: list[FunctionEntry] = []
    rows: list[TaskEntry] = []
    for pin, layout in materials:
        layer = layer_of(pin.requires)
        suite = await study(pin.name, layout, tier, layer)
        progress(f"{pin.name}: {len(suite.tests)} quick and steady tests, {len(suite.calls)} modules with calls")
        candidates = _candidates(layout, suite, config)
        gate = asyncio.Semaphore(config.num_sandboxes)

        jobs = [_gated(gate, _Bench(layout, suite, tier, layer, config), path, span) for path, span in candidates]
        results = [item for item in await asyncio.gather(*jobs) if item is not None]
        num_tasks = 0
        for entry, found in _rationed(results, config.max_per_package):
            entries.append(msgspec.structs.replace(entry, package=pin.name))
            rows += [msgspec.structs.replace(row, function=len(entries) - 1) for row in found]
            num_tasks += len(found)
        progress(f"{pin.name}: {num_tasks} tasks of {len(results)} functions, {len(candidates)} functions tried")
    if not rows:
        names = ", ".join(pin.name for pin, _ in materials)
        raise TaskError(f"{names}: no usable function: need two quick tests and two calls in literals that reach one")
    modules = [module_name(entries[row.function].path) for row in rows]
    split_seed = best_split_seed(modules, config.seed)
    layouts = {pin.name: (pin, layout) for pin, layout in materials}
    trees: dict[str, dict[str, ast.Module]] = {name: {} for name in layouts}
    finished = []
    for row in rows:
        entry = entries[row.function]
        pin, layout = layouts[entry.package]
        split = split_of(module_name(entry.path), split_seed)
        built = build(pin, layout, entry, row, split=split, trees=trees[entry.package])
        finished.append(msgspec.structs.replace(row, digest=fingerprint(built)))
    return Manifest(
        name=name,
        seed=config.seed,
        split_seed=split_seed,
        python=platform.python_version(),
        packages=tuple(pin for pin, _ in materials),
        functions=tuple(entries),
        tasks=tuple(finished),
    )


@dataclass(frozen=True)
class _Watch:
    """A healthy file, and what watches over one function of it."""

    path: str
    gold: str
    tests: tuple[str, ...]
    calls: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Bench:
    """What the trial of a function needs beside it."""

    layout: Layout
    suite: Suite
    tier: SandboxTier
    layer: Layer
    config: SynthesisConfig

    def workspace(self, tests: Sequence[str]) -> Tree:
        return tree(dict(self.layout.sources), dict(self.layout.data), test_files(self.layout, tests))


_Result = tuple[FunctionEntry, list[TaskEntry]]


async def _gated(gate: asyncio.Semaphore, bench: _Bench, path: str, span: FunctionSpan) -> _Result | None:
    async with gate:
        return await _function_tasks(bench, path, span)


def _rationed(results: Sequence[_Result], most: int) -> list[_Result]:
    """Where a package brings more than its share, every function gives its first tasks before any gives its last."""
    rank = 0
    left = most
    kept: list[list[TaskEntry]] = [[] for _ in results]
    while left > 0 and any(rank < len(rows) for _, rows in results):
        for mine, (_, rows) in zip(kept, results, strict=True):
            if rank < len(rows) and left > 0:
                mine.append(rows[rank])
                left -= 1
        rank += 1
    return [(entry, mine) for mine, (entry, _) in zip(kept, results, strict=True) if mine]


def _candidates(layout: Layout, suite: Suite, config: SynthesisConfig) -> list[tuple[str, FunctionSpan]]:
    """Functions that are small, plain, and watched by tests and calls."""
    watched: dict[str, int] = {}
    for reached in suite.tests.values():
        for key in reached:
            watched[key] = watched.get(key, 0) + 1
    called: dict[str, int] = {}
    for path, calls in suite.calls.items():
        for call in calls:
            for key in call.reached:
                if key.startswith(path + ":"):
                    called[key] = called.get(key, 0) + 1
    found: list[tuple[str, FunctionSpan]] = []
    for path, source in sorted(layout.sources.items()):
        module = parse(source)
        plain = _plain_functions(module)
        for span in {item.qualname: item for item in functions(source, module)}.values():
            key = f"{path}:{span.qualname}"
            small = span.end_line - span.start_line < config.max_function_lines
            small = small and span.end - span.start <= config.max_function_chars
            if small and span.start_line in plain and watched.get(key, 0) >= 2 and called.get(key, 0) >= 2:
                found.append((path, span))
    by_hash = sorted(found, key=lambda item: _hash(f"{config.seed}/{item[0]}:{item[1].qualname}"))
    return sorted(by_hash[: config.max_functions], key=lambda item: (item[0], item[1].start))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _plain_functions(module: ast.Module) -> set[int]:
    """First lines of functions that are not coroutines, take nothing by `send`, and carry no unknown decorator."""
    lines: set[int] = set()
    for node in ast.walk(module):
        if not isinstance(node, FunctionNode) or isinstance(node, ast.AsyncFunctionDef):
            continue
        names = [item.id if isinstance(item, ast.Name) else "" for item in node.decorator_list]
        sent = any(
            isinstance(child, ast.Assign | ast.AnnAssign | ast.Return) and isinstance(child.value, ast.Yield)
            for child in ast.walk(node)
        )
        if not sent and all(name in ("staticmethod", "classmethod", "property") for name in names):
            lines.add(min([node.lineno, *(item.lineno for item in node.decorator_list)]))
    return lines


async def _function_tasks(bench: _Bench, path: str, span: FunctionSpan) -> _Result | None:
    """All the tasks of one function, with what watches over it; None where no fault holds."""
    key = f"{path}:{span.qualname}"
    gold = bench.layout.sources[path]
    reaching = [(len(reached), id_) for id_, reached in bench.suite.tests.items() if key in reached]
    tests = sorted(id_ for _, id_ in sorted(reaching)[: bench.config.max_tests])
    reached_calls = [call for call in bench.suite.calls.get(path, []) if key in call.reached]
    reached_calls.sort(key=lambda call: (call.result.startswith("raise "), len(call.reached), len(call.expression)))
    calls = [(call.expression, call.result) for call in reached_calls[: 3 * bench.config.max_calls]]
    mutations = _order(
        [item for item in sites(gold, span.qualname) if span.start <= item.start < span.end],
        f"{bench.config.seed}/{key}",
    )
    box = await bench.tier.open(bench.workspace(tests), bench.layer, SandboxLimits())
    try:
        healthy = await _statuses(box, tests)
        watch = _Watch(path, gold, tuple(id_ for id_ in tests if healthy[id_].status == "passed"), tuple(calls))
        found = await _screen(box, watch, mutations, bench.config) if len(watch.tests) >= 2 else []
    finally:
        await box.close()
    chosen = _choose_calls(found, len(calls), bench.config.max_calls)
    found = [item for item in found if item.differing & set(chosen)]
    watch = _Watch(path, gold, watch.tests, tuple(calls[index] for index in chosen))
    found = await _again(bench, watch, found) if len(watch.calls) >= 2 and found else []
    if not found:
        return None
    entry = FunctionEntry(package="", path=path, qualname=span.qualname, tests=watch.tests, calls=watch.calls)
    return entry, [_row(item, watch.tests) for item in found]


async def _screen(box: Sandbox, watch: _Watch, mutations: Sequence[Mutation], config: SynthesisConfig) -> list[_Found]:
    found: list[_Found] = []
    kinds: dict[str, int] = {}
    for mutation in mutations[: config.max_tries_per_function]:
        if len(found) == config.max_per_function:
            break
        if kinds.get(mutation.operator, 0) >= (1 if mutation.operator in _HARD else 2):
            continue
        holds = await _try(box, watch, mutation)
        if holds is not None:
            found.append(holds)
            kinds[mutation.operator] = kinds.get(mutation.operator, 0) + 1
    return found


def _row(found: _Found, tests: Sequence[str]) -> TaskEntry:
    shown = shown_checks([tests[index] for index in found.fail])
    mutation = found.mutation
    return TaskEntry(
        function=0,
        operator=mutation.operator,
        start=mutation.start,
        old=mutation.old,
        new=mutation.new,
        fail=found.fail,
        shown=tuple(tests.index(id_) for id_ in shown),
    )


def _order(mutations: Sequence[Mutation], salt: str) -> list[Mutation]:
    """By hash, one of each operator before the second of any."""

    def hashed(text: str) -> str:
        return _hash(f"{salt}/{text}")

    kinds: dict[str, list[Mutation]] = {}
    for mutation in sorted(mutations, key=lambda item: hashed(f"{item.operator}/{item.start}/{item.old}/{item.new}")):
        kinds.setdefault(mutation.operator, []).append(mutation)
    names = sorted(kinds, key=hashed)
    longest = max((len(items) for items in kinds.values()), default=0)
    return [kinds[name][rank] for rank in range(longest) for name in names if rank < len(kinds[name])]


async def _try(box: Sandbox, watch: _Watch, mutation: Mutation) -> _Found | None:
    await box.write(tree({watch.path: apply(watch.gold, mutation)}))
    differing = await _differing(box, watch)
    if not differing:
        return None
    reports = await _statuses(box, watch.tests)
    if any(report.status not in ("passed", "failed", "error") for report in reports.values()):
        return None
    fail = tuple(index for index, id_ in enumerate(watch.tests) if reports[id_].status != "passed")
    if not fail or len(fail) == len(watch.tests):
        return None
    return _Found(mutation, fail, differing)


async def _again(bench: _Bench, watch: _Watch, found: list[_Found]) -> list[_Found]:
    """Those that hold again, twice, in a fresh sandbox; none where the healthy version does not."""
    box = await bench.tier.open(bench.workspace(watch.tests), bench.layer, SandboxLimits())
    try:
        kept = found
        for _ in range(2):
            repeated = [await _try(box, watch, item.mutation) for item in kept]
            kept = [
                item
                for item, other in zip(kept, repeated, strict=True)
                if other is not None and other.fail == item.fail
            ]
        await box.write(tree({watch.path: watch.gold}))
        healthy = await _statuses(box, watch.tests)
        steady = all(report.status == "passed" for report in healthy.values()) and not await _differing(box, watch)
        return kept if steady else []
    finally:
        await box.close()


async def _statuses(box: Sandbox, tests: Sequence[str]) -> dict[str, TestReport]:
    nonce = new_nonce()
    request = pytest_stdin(nonce, tests, rewrite=False, cpu_s=3)
    done = await box.python(pytest_source(), timeout_s=RUN_TIMEOUT_S, preload=PYTEST_PRELOAD, stdin=request)
    return parse_statuses(done.stdout, nonce, tests)


async def _differing(box: Sandbox, watch: _Watch) -> frozenset[int]:
    """Calls with another result than recorded; none at all where a call brought the process to its limits."""
    nonce = new_nonce()
    request = replay_stdin(nonce, module_name(watch.path), [expression for expression, _ in watch.calls], cpu_s=2)
    done = await box.python(replay_source(), timeout_s=RUN_TIMEOUT_S, stdin=request)
    results = parse_replay(done.stdout, nonce, len(watch.calls))
    if None in results:
        return frozenset()
    expected = [result for _, result in watch.calls]
    return frozenset(index for index, pair in enumerate(zip(results, expected, strict=True)) if pair[0] != pair[1])


def _choose_calls(found: Sequence[_Found], num_calls: int, most: int) -> list[int]:
    """Few calls that tell every fault from health, as far as `most` allow; at least two where there are two."""
    chosen: list[int] = []
    waiting = list(found)
    while waiting and len(chosen) < most:
        best = max(range(num_calls), key=lambda index: (sum(index in item.differing for item in waiting), -index))
        if not any(best in item.differing for item in waiting):
            break
        chosen.append(best)
        waiting = [item for item in waiting if best not in item.differing]
    chosen += [index for index in range(num_calls) if index not in chosen][: max(0, min(4, most) - len(chosen))]
    return sorted(chosen)
