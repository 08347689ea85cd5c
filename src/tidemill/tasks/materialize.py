"""From a manifest to a task set on disk: packages are fetched, faults are placed; nothing is validated again."""

import ast
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tidemill.core.checks import new_nonce, parse_replay, replay_source, replay_stdin
from tidemill.core.errors import TaskError
from tidemill.core.records import Layer
from tidemill.core.seams import SandboxLimits, SandboxTier
from tidemill.tasks.build import BuiltTask, build, fingerprint
from tidemill.tasks.folder import TaskSet, check_new, write_task_set
from tidemill.tasks.layout import Layout, layout, module_name, tree
from tidemill.tasks.manifest import FunctionEntry, Manifest, dump, layer_of, split_of
from tidemill.tasks.packages import PackagePin, fetch, read_archive


def fetch_materials(pins: Sequence[PackagePin]) -> list[tuple[PackagePin, Layout]]:
    """Every package, with its hash, sorted into source and tests. Raises `TaskError`."""

    with ThreadPoolExecutor(max_workers=4) as pool:
        fetched = list(pool.map(fetch, pins))
    return [(pin, layout(read_archive(archive), f"{pin.name}=={pin.version}")) for archive, pin in fetched]


async def materialize(
    manifest: Manifest,
    out_folder: Path,
    tier: SandboxTier | None = None,
    *,
    materials: Sequence[tuple[PackagePin, Layout]] | None = None,
) -> TaskSet:
    """Write the task set of a manifest to a new folder, every task checked against its digest.

    The manifest's recorded calls hold for the Python that it was made with; under another one (and given a `tier`)
    they are recorded again on the healthy version, because Python words its own errors anew with each release.
    Raises `UsageError` for a folder in use, `TaskError` where a task does not come out as it was.
    """
    check_new(out_folder)
    found = {pin.name: (pin, item) for pin, item in materials or fetch_materials(manifest.packages)}
    layers = {name: layer_of(pin.requires) for name, (pin, _) in found.items()}
    built = build_all(manifest, found)
    if tier is not None and _release(manifest.python) != _release(platform.python_version()):
        built = await _record_again(manifest, built, found, layers, tier)
    packages = [manifest.functions[row.function].package for row in manifest.tasks]
    pairs = [(item, layers[name]) for item, name in zip(built, packages, strict=True)]
    return write_task_set(out_folder, pairs, dump(manifest))


def build_all(manifest: Manifest, materials: Mapping[str, tuple[PackagePin, Layout]]) -> list[BuiltTask]:
    """All tasks of a manifest. Raises `TaskError` where one is not what it was when the manifest was made."""
    built: list[BuiltTask] = []
    trees: dict[str, dict[str, ast.Module]] = {name: {} for name in materials}
    for row in manifest.tasks:
        function = manifest.functions[row.function]
        pin, item = materials[function.package]
        split = split_of(module_name(function.path), manifest.split_seed)
        made = build(pin, item, function, row, split=split, trees=trees[function.package])
        if fingerprint(made) != row.digest:
            raise TaskError(
                f"task {made.task.id} does not come out as in the manifest {manifest.name!r}: its digest is "
                f"{fingerprint(made)}, not {row.digest}; the manifest belongs to another version of Tidemill"
            )
        built.append(made)
    return built


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


async def _record_again(
    manifest: Manifest,
    built: Sequence[BuiltTask],
    materials: Mapping[str, tuple[PackagePin, Layout]],
    layers: Mapping[str, Layer],
    tier: SandboxTier,
) -> list[BuiltTask]:
    fresh = [await _replay(function, materials[function.package][1], layers, tier) for function in manifest.functions]
    result: list[BuiltTask] = []
    for item, row in zip(built, manifest.tasks, strict=True):
        calls = tuple(
            msgspec.structs.replace(call, expected=text)
            for call, text in zip(item.verifier.calls, fresh[row.function], strict=True)
            if text is not None and not text.startswith(("refused:", "import failed:"))
        )
        result.append(msgspec.structs.replace(item, verifier=msgspec.structs.replace(item.verifier, calls=calls)))
    return result


async def _replay(
    function: FunctionEntry, item: Layout, layers: Mapping[str, Layer], tier: SandboxTier
) -> list[str | None]:
    box = await tier.open(tree(dict(item.sources), dict(item.data)), layers[function.package], SandboxLimits())
    try:
        nonce = new_nonce()
        expressions = [expression for expression, _ in function.calls]
        request = replay_stdin(nonce, module_name(function.path), expressions)
        done = await box.python(replay_source(), timeout_s=60, stdin=request)
        return parse_replay(done.stdout, nonce, len(expressions))
    finally:
        await box.close()
