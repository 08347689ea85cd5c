"""What `tidemill tasks …` does: each function returns an exit code and the lines to print. The command line wires them.

Errors are raised as `TaskError` (exit code 1) and `UsageError` (2), with one line for the user.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tidemill.core.errors import UsageError
from tidemill.core.records import Task
from tidemill.core.seams import SandboxTier
from tidemill.tasks.check import check, try_patch
from tidemill.tasks.folder import TaskSet, check_new, load
from tidemill.tasks.layout import Layout, layout
from tidemill.tasks.manifest import Manifest, load_manifest
from tidemill.tasks.materialize import fetch_materials, materialize
from tidemill.tasks.packages import PackagePin, declared_requirements, parse_requirement, read_repository
from tidemill.tasks.synth import SynthesisConfig, synthesize
from tidemill.tasks.vault import FolderVault

Result = tuple[int, list[str]]


def read_material(source: str) -> tuple[PackagePin, Layout]:
    """`NAME==VERSION`, fetched by pip, or the folder of a repository. Raises `UsageError`, `TaskError`."""
    pin = parse_requirement(source)
    if pin is not None:
        return fetch_materials([pin])[0]
    folder = Path(source)
    if not folder.exists() and "/" not in source:
        raise UsageError(f"{source!r} is no folder; of a package, give the version too: {source}==VERSION")
    return read_folder(folder)


def read_folder(folder: Path) -> tuple[PackagePin, Layout]:
    """A repository of the user's own, with what it declares to require. Raises `UsageError`, `TaskError`."""
    files = read_repository(folder)
    whole = hashlib.sha256()
    for path, data in sorted(files.items()):
        whole.update(f"{len(path)} {path} {len(data)} ".encode() + data)
    name = folder.resolve().name
    found = layout(files, str(folder))
    requires = declared_requirements(files)
    return PackagePin(name=name, version="local", sha256=whole.hexdigest(), requires=requires), found


async def synth(
    source: str,
    out: Path,
    tier: SandboxTier,
    config: SynthesisConfig,
    progress: Callable[[str], None] = lambda line: None,
) -> Result:
    """`tidemill tasks synth REPO|NAME==VERSION -o DIR`."""
    check_new(out)
    material = read_material(source)
    manifest = await synthesize(material[0].name, [material], tier, config, progress)
    taskset = await materialize(manifest, out, materials=[material])
    return 0, [*summary(taskset), f"wrote {out}"]


async def unpack(manifest: Path, out: Path, tier: SandboxTier | None) -> Result:
    """The task set of a committed manifest."""
    taskset = await materialize(load_manifest(manifest), out, tier)
    return 0, [*summary(taskset), f"wrote {out}"]


async def check_set(folder: Path, tier: SandboxTier, sample: int = 20, seed: int = 0) -> Result:
    """`tidemill tasks check DIR`: exit code 1 where a task of the sample is not what it says."""
    taskset = load(folder)
    findings = await check(taskset, FolderVault(folder / "vault"), tier, sample=sample, seed=seed)
    num = min(sample, len(taskset.tasks)) if sample else len(taskset.tasks)
    lines = [f"{item.task_id}: {item.problem}" for item in findings]
    bad = len({item.task_id for item in findings})
    return (1 if findings else 0), [*lines, f"{num - bad} of {num} tasks are sound"]


def show(folder: Path, task_id: str | None) -> Result:
    """`tidemill tasks show TASK`: what the agent is told; without an id, the ids."""
    taskset = load(folder)
    if task_id is None:
        return 0, [*(task.id for task in taskset.tasks), *summary(taskset)]
    task = taskset.task(task_id)
    lines = [f"{task.id} ({task.family}, {task.split})", task.statement, ""]
    lines += [f"{number:3} {line}" for number, line in enumerate(window(taskset, task), 1)]
    lines += ["", "shown checks:", *(f"  {id_}" for id_ in task.shown_checks)]
    return 0, lines


async def solve(folder: Path, task_id: str, tier: SandboxTier) -> Result:
    """`tidemill tasks solve TASK`: the repair and the untouched workspace, through the verifier."""
    taskset = load(folder)
    task = taskset.task(task_id)
    verifier = FolderVault(folder / "vault").verifier(task_id)
    lines: list[str] = []
    good = True
    for name, patch, wanted in (("no patch", None, False), ("oracle patch", verifier.gold, True)):
        trial = await try_patch(taskset.workspace(task), taskset.layer(task), verifier, tier, patch)
        passed = sum(report.status == "passed" for report in trial.reports.values())
        lines.append(
            f"{name}: {'solved' if trial.solved else 'not solved'}, {passed} of {len(trial.reports)} tests pass, "
            f"{trial.num_equal_calls} of {trial.num_calls} calls agree"
        )
        good = good and trial.solved is wanted
    return (0 if good else 1), lines


def window(taskset: TaskSet, task: Task) -> list[str]:
    """The lines of the faulty function."""
    path, first, last = task.data["path"], task.data["first_line"], task.data["last_line"]
    assert isinstance(first, int) and isinstance(last, int)
    (text,) = [file.data.decode() for file in taskset.workspace(task).files if file.path == path]
    return text.split("\n")[first - 1 : last]


def summary(taskset: TaskSet) -> list[str]:
    """How many tasks, by package, split and operator."""
    lines = [f"{len(taskset.tasks)} tasks of {len({_function(task) for task in taskset.tasks})} functions"]
    for name in ("package", "operator"):
        counts = Counter(task.provenance[name] for task in taskset.tasks)
        lines.append(f"by {name}: " + ", ".join(f"{key} {num}" for key, num in counts.most_common()))
    splits = Counter(task.split for task in taskset.tasks)
    lines.append("by split: " + ", ".join(f"{key} {splits[key]}" for key in ("train", "dev", "heldout")))
    return lines


def _function(task: Task) -> tuple[str, str]:
    return task.provenance["module"], task.provenance["function"]


def shipped_manifest(name: str = "mend-v1") -> Manifest:
    """The manifest of a task set that ships with the source."""
    return load_manifest(Path(__file__).parents[3] / "tasksets" / name / "manifest.json")
