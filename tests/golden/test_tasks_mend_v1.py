"""The committed task set: what a figure measured on it may rely on.

It changes only with a stated reason: figures measured on the set are then no longer comparable. `synthesize` over
`MEND_V1` with the manifest's seed makes it again.
"""

import asyncio
import re
from collections import Counter
from pathlib import Path

import pytest

from tidemill.tasks.commands import shipped_manifest
from tidemill.tasks.layout import module_name
from tidemill.tasks.manifest import dump, split_of
from tidemill.tasks.materialize import materialize
from tidemill.tasks.sets import MEND_V1

PATH = Path(__file__).parents[2] / "tasksets" / "mend-v1" / "manifest.json"


def test_the_manifest_is_small_and_in_one_form() -> None:
    text = PATH.read_text()
    assert dump(shipped_manifest()) == text
    assert len(text.encode()) < 300_000


def test_the_set_is_large_and_balanced() -> None:
    manifest = shipped_manifest()
    assert len(manifest.tasks) >= 300
    packages = Counter(manifest.functions[row.function].package for row in manifest.tasks)
    assert len(packages) >= 2 and max(packages.values()) <= 0.6 * len(manifest.tasks)
    assert max(Counter(row.function for row in manifest.tasks).values()) <= 6
    assert len({row.operator for row in manifest.tasks}) >= 8
    splits = Counter(
        split_of(module_name(manifest.functions[row.function].path), manifest.split_seed) for row in manifest.tasks
    )
    for split, share in {"train": 0.7, "dev": 0.1, "heldout": 0.2}.items():
        assert abs(splits[split] / len(manifest.tasks) - share) < 0.06, splits


def test_every_task_can_be_graded() -> None:
    manifest = shipped_manifest()
    for row in manifest.tasks:
        function = manifest.functions[row.function]
        assert 0 < len(row.fail) < len(function.tests)
        assert row.shown and set(row.shown) <= set(row.fail)
        assert len(function.calls) >= 2
        assert row.old != row.new


def test_packages_are_pinned_to_their_bytes() -> None:
    pins = {pin.name: pin for pin in shipped_manifest().packages}
    assert {name: pin.version for name, pin in pins.items()} == {pin.name: pin.version for pin in MEND_V1}
    assert all(re.fullmatch(r"[0-9a-f]{64}", pin.sha256) and pin.license for pin in pins.values())


@pytest.mark.slow
def test_the_set_comes_out_as_it_was(tmp_path: Path) -> None:
    """Fetches the packages; every task is compared with its digest."""
    manifest = shipped_manifest()
    taskset = asyncio.run(materialize(manifest, tmp_path / "set"))
    assert len(taskset.tasks) == len(manifest.tasks) == len({task.id for task in taskset.tasks})
