"""A repository whose tests fail: which function is to blame, and the task that asks to mend it.

The task is the one that synthesis would have made of that fault, so that a policy sees in service what it saw in
training. What is missing is the healthy version: the verifier holds the repository's own tests, and no recorded calls.
"""

import hashlib
import math
import re
from collections.abc import Sequence

from tidemill.core.errors import TaskError, UsageError
from tidemill.core.records import Layer, Record, Tree, Verifier
from tidemill.core.seams import SandboxTier
from tidemill.tasks.build import BuiltTask, mend_task, shown_checks, target, test_files
from tidemill.tasks.layout import Layout, module_name, tree
from tidemill.tasks.packages import PackagePin
from tidemill.tasks.suite import run_suite
from tidemill.tasks.synth import SynthesisConfig

MAX_WATCHING = SynthesisConfig().max_tests
"""Passing tests that watch a repair while it is made; all of them are run in the end."""


class Suspect(Record, frozen=True):
    """A function that failing tests reach."""

    path: str
    qualname: str
    score: float
    """In (0, 1]: see `suspects`."""
    failing: tuple[str, ...]
    """Tests that reach it and fail."""
    passing: tuple[str, ...]
    """Tests that reach it and pass, those that reach the least beside it first."""


class Diagnosis(Record, frozen=True):
    """What a repository's tests say of it as it is."""

    pin: PackagePin
    layout: Layout
    layer: Layer
    statuses: dict[str, str]
    """Test id → status."""
    reached: dict[str, tuple[str, ...]]
    """Test id → functions that it reaches, as `path:qualname`."""
    errors: tuple[str, ...]
    """Test files that could not be collected, with the cause."""

    @property
    def failing(self) -> tuple[str, ...]:
        return tuple(id_ for id_, status in self.statuses.items() if status in ("failed", "missing"))


async def diagnose(pin: PackagePin, layout: Layout, layer: Layer, tier: SandboxTier) -> Diagnosis:
    """Run the tests once. Raises `UsageError` where there is nothing to mend, or no way to tell what."""
    try:
        probe = await run_suite(layout, tier, layer, trace=True)
    except TaskError as error:
        raise UsageError(f"{pin.name}: {error}: take out or skip the test that never ends, or takes minutes") from error
    found = Diagnosis(
        pin=pin,
        layout=layout,
        layer=layer,
        statuses={test.id: test.status for test in probe.tests},
        reached={test.id: test.reached for test in probe.tests},
        errors=probe.errors,
    )
    if not found.statuses:
        raise UsageError(f"{pin.name}: not one test could be collected{_first_error(found)}")
    if not found.failing:
        raise UsageError(f"{pin.name}: no test fails ({len(found.statuses)} run): nothing to mend{_first_error(found)}")
    return found


def suspects(found: Diagnosis, tests: Sequence[str] | None = None) -> list[Suspect]:
    """Functions that the failing tests reach, the most suspicious first.

    By Ochiai's coefficient, failing reached / sqrt(failing · reached by any) (Abreu et al. 2007): a function that all
    failing tests reach, and no other test, has 1. `tests`: the failing tests that count; all where it is None.
    """
    failing = set(found.failing if tests is None else tests)
    by_function: dict[str, list[str]] = {}
    for id_, reached in found.reached.items():
        for key in reached:
            by_function.setdefault(key, []).append(id_)
    ranked = []
    for key, ids in by_function.items():
        path, _, qualname = key.partition(":")
        broken = tuple(id_ for id_ in ids if id_ in failing)
        if not broken or not _is_function(found.layout, path, qualname):
            continue
        healthy = [id_ for id_ in ids if found.statuses[id_] == "passed"]
        ranked.append(
            Suspect(
                path=path,
                qualname=qualname,
                score=len(broken) / math.sqrt(len(failing) * (len(broken) + len(healthy))),
                failing=broken,
                passing=tuple(sorted(healthy, key=lambda id_: (len(found.reached[id_]), id_))),
            )
        )
    # Of those that no test tells apart, a constructor is reached on the way to the others.
    return sorted(ranked, key=lambda one: (-one.score, one.qualname.endswith("__"), one.path, one.qualname))


def matching_tests(found: Diagnosis, asked: str) -> list[str]:
    """The failing tests of an id, or of the start of one: a file, a class, a function with all its parameters.

    Raises `UsageError` where there is none, or where they pass.
    """
    ids = [id_ for id_ in found.statuses if id_ == asked or id_.startswith((f"{asked}::", f"{asked}["))]
    if not ids:
        some = ", ".join(found.failing[:3])
        raise UsageError(f"no test {asked!r} was run: give the id of one that fails, such as {some}")
    failing = [id_ for id_ in ids if id_ in set(found.failing)]
    if not failing:
        raise UsageError(f"test {asked!r} passes: give the id of one that fails, such as {found.failing[0]}")
    return failing


def task_of(found: Diagnosis, suspect: Suspect) -> BuiltTask:
    """The task to mend one function, its workspace, and the verifier of its own tests."""
    source = found.layout.sources[suspect.path]
    module = module_name(suspect.path)
    shown = shown_checks(_watching(found, suspect))
    mark = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:6]
    task = mend_task(
        f"{module}.{suspect.qualname}-{mark}",
        suspect.path,
        target(source, suspect.qualname),
        shown,
        split="heldout",
        provenance={
            "package": found.pin.name,
            "version": found.pin.version,
            "license": found.pin.license,
            "module": module,
            "function": suspect.qualname,
            "operator": "unknown",
        },
    )
    layout, watching = found.layout, suspect.passing[:MAX_WATCHING]
    return BuiltTask(
        task=task,
        workspace=tree(dict(layout.sources), dict(layout.data), test_files(layout, shown)),
        verifier=Verifier(
            task_id=task.id,
            fail_to_pass=suspect.failing,
            pass_to_pass=watching,
            files=tree(test_files(layout, [*suspect.failing, *watching])),
            allowed_paths=(suspect.path,),
            calls=(),
            module=module,
            gold=Tree(files=()),
        ),
    )


async def broken_by(found: Diagnosis, path: str, text: str, tier: SandboxTier) -> tuple[list[str], int]:
    """Tests that passed before a file was changed and do not pass now, twice in a row in fresh sandboxes; and how many
    pass now. All tests are listed where the suite does not come to its end."""
    layout = Layout(sources={**found.layout.sources, path: text}, tests=found.layout.tests, data=found.layout.data)
    passed_before = [id_ for id_, status in found.statuses.items() if status == "passed"]
    broken, num_passing = passed_before, 0
    for _ in range(2):
        try:
            probe = await run_suite(layout, tier, found.layer, trace=False)
        except TaskError:
            return passed_before, 0
        passing = {test.id for test in probe.tests if test.status == "passed"}
        broken, num_passing = [id_ for id_ in broken if id_ not in passing], len(passing)
        if not broken:
            break
    return broken, num_passing


def _watching(found: Diagnosis, suspect: Suspect) -> list[str]:
    """The failing ones of the tests that reach the least beside the function, which synthesis would have taken."""
    ids = sorted((*suspect.failing, *suspect.passing), key=lambda id_: (len(found.reached[id_]), id_))
    broken = set(suspect.failing)
    near = [id_ for id_ in ids[:MAX_WATCHING] if id_ in broken]
    return near or [id_ for id_ in ids if id_ in broken][:MAX_WATCHING]


def _is_function(layout: Layout, path: str, qualname: str) -> bool:
    try:
        target(layout.sources[path], qualname)
    except (KeyError, TaskError):
        return False
    return True


def _first_error(found: Diagnosis) -> str:
    """The first file that could not be collected, and how to mend that."""
    if not found.errors:
        return ""
    missing = re.search(r"No module named '(\w+)", " ".join(found.errors))
    own = {module_name(path).split(".")[0] for path in found.layout.sources}
    if missing is None or missing[1] in own:
        return f"; {found.errors[0]}"
    return (
        f"; the tests import {missing[1]}, which the sandbox's layer lacks: pip install its package here, and name it "
        f"under [project] dependencies in pyproject.toml, or with --requires"
    )
