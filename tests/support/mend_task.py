"""A small task of the family `mend`, with its verifier: what the task builder makes of a real package."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tidemill.core.blobs import MemoryBlobs, put_record
from tidemill.core.records import Layer, Limits, RecordedCall, Split, Task, Tree, TreeFile, Verifier, digest
from tidemill.sandboxes.layers import installed_layer
from tidemill.tasks.build import BuiltTask
from tidemill.tasks.folder import write_task_set

GOLD = '''"""Ranges."""


def clamp(value, low, high):
    """Put a value between two others."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def span(values):
    return max(values) - min(values)
'''
FAULTY = GOLD.replace("if value < low:", "if value > low:")
SHOWN = "from ranges import clamp\n\n\ndef test_shown():\n    assert clamp(0, 1, 5) == 1\n"
HIDDEN = (
    "from ranges import clamp, span\n\n\ndef test_low():\n    assert clamp(-3, 1, 5) == 1\n\n\n"
    "def test_inside():\n    assert clamp(3, 1, 5) == 3\n\n\ndef test_span():\n    assert span([1, 4]) == 3\n"
)
PATH = "ranges.py"


def tree(**files: str) -> Tree:
    return Tree(
        files=tuple(TreeFile(path=path.replace("__", "/") + ".py", data=files[path].encode()) for path in sorted(files))
    )


@dataclass
class World:
    """Everything that a task needs, in memory. It is its own vault."""

    task: Task
    repository: Tree
    layers: dict[str, Layer]
    hidden: Verifier
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)

    def verifier(self, task_id: str) -> Verifier:
        assert task_id == self.task.id
        return self.hidden


def mend_world(
    *,
    layer: Layer,
    gold: str = GOLD,
    faulty: str = FAULTY,
    max_steps: int = 12,
    max_sampled_tokens: int = 400,
    failure: str = "",
) -> World:
    blobs = MemoryBlobs()
    repository = tree(ranges=faulty, tests__test_shown=SHOWN)
    task = Task(
        id="ranges-1",
        family="mend",
        environment="mend",
        split="train",
        statement="clamp gives wrong results.",
        repository=put_record(blobs, repository),
        layer=digest(layer),
        limits=Limits(
            max_steps=max_steps,
            max_sampled_tokens=max_sampled_tokens,
            max_context_tokens=2000,
            max_observation_tokens=120,
            wall_s=60.0,
        ),
        shown_checks=("tests/test_shown.py::test_shown",),
        data={"path": PATH, "first_line": 4, "last_line": 10, **({"failure": failure} if failure else {})},
        provenance={},
    )
    hidden = Verifier(
        task_id=task.id,
        fail_to_pass=("tests/test_hidden.py::test_low", "tests/test_hidden.py::test_inside"),
        pass_to_pass=("tests/test_hidden.py::test_span",),
        files=tree(tests__test_hidden=HIDDEN, tests__test_shown=SHOWN),
        allowed_paths=(PATH,),
        calls=(
            RecordedCall(expression="clamp(-7, 2, 9)", expected="2"),
            RecordedCall(expression="clamp(11, 2, 9)", expected="9"),
            RecordedCall(expression="span([5, 1])", expected="4"),
        ),
        module="ranges",
        gold=tree(ranges=gold),
    )
    return World(task=task, repository=repository, layers={digest(layer): layer}, hidden=hidden, blobs=blobs)


def mend_task_set(folder: Path, *, split: Split = "heldout", num: int = 1) -> Path:
    """A task set folder of `num` tasks with the same fault, and their vault."""
    layer = installed_layer(["pytest"])
    world = mend_world(layer=layer)
    built = []
    for index in range(num):
        name = f"ranges-{index}"
        provenance = {"package": "even" if index % 2 == 0 else "odd"}
        task = msgspec.structs.replace(world.task, id=name, split=split, provenance=provenance)
        verifier = msgspec.structs.replace(world.hidden, task_id=name)
        built.append((BuiltTask(task=task, workspace=world.repository, verifier=verifier), layer))
    write_task_set(folder, built, "{}")
    return folder
