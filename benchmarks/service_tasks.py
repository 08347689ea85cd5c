"""Does `tidemill agent` ask the policy what training asked? Faults of the shipped task set, put back into their whole
packages and diagnosed from the packages' tests alone; the tasks that come out are compared with those of training.

    .venv/bin/python benchmarks/service_tasks.py [TASKS_PER_PACKAGE]
"""

import asyncio
import random
import sys
from collections import Counter

import msgspec

from tidemill.core.records import digest
from tidemill.sandboxes.namespaces import NamespacesTier
from tidemill.tasks.broken import diagnose, suspects, task_of
from tidemill.tasks.build import BuiltTask
from tidemill.tasks.commands import shipped_manifest
from tidemill.tasks.layout import Layout
from tidemill.tasks.manifest import FunctionEntry, layer_of
from tidemill.tasks.materialize import build_all, fetch_materials
from tidemill.tasks.packages import PackagePin


async def compare(
    pin: PackagePin, layout: Layout, function: FunctionEntry, trained: BuiltTask, tier: NamespacesTier
) -> dict[str, int]:
    (faulty,) = [file.data.decode() for file in trained.workspace.files if file.path == function.path]
    sources = {**layout.sources, function.path: faulty}
    found = await diagnose(pin, msgspec.structs.replace(layout, sources=sources), layer_of(pin.requires), tier)
    ranked = suspects(found)
    rank = next(
        (at for at, one in enumerate(ranked) if (one.path, one.qualname) == (function.path, function.qualname)), None
    )
    if rank is None:
        return {"tasks": 1}
    served = task_of(found, ranked[rank])
    same = all(
        getattr(served.task, name) == getattr(trained.task, name) for name in ("statement", "shown_checks", "data")
    )
    same = same and digest(served.workspace) == digest(trained.workspace)
    print(f"{pin.name:11} {function.qualname:28} suspect {rank + 1}, {'the same task' if same else 'another task'}")
    return {"tasks": 1, "most suspicious": int(rank == 0), "same task": int(same)}


async def main(per_package: int) -> None:
    manifest = shipped_manifest()
    materials = {pin.name: (pin, layout) for pin, layout in fetch_materials(manifest.packages)}
    pairs = list(zip(manifest.tasks, build_all(manifest, materials), strict=True))
    random.Random(3).shuffle(pairs)
    taken: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    tier = NamespacesTier("service-tasks")
    tier.reap()
    try:
        for row, trained in pairs:
            function = manifest.functions[row.function]
            if taken[function.package] < per_package:
                taken[function.package] += 1
                pin, layout = materials[function.package]
                totals.update(await compare(pin, layout, function, trained, tier))
    finally:
        await tier.close()
    print(", ".join(f"{name}: {num}" for name, num in totals.items()))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3))
