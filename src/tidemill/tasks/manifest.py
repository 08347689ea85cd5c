"""A task set on paper: small, committed, and enough to make every task again, byte for byte."""

import hashlib
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from tidemill.core.errors import TaskError
from tidemill.core.records import Layer, Limits, Record, Split
from tidemill.tasks.packages import PackagePin

SHARES: dict[Split, float] = {"train": 0.7, "dev": 0.1, "heldout": 0.2}
DEFAULT_LIMITS = Limits(
    max_steps=8, max_sampled_tokens=384, max_context_tokens=2048, max_observation_tokens=192, wall_s=60.0
)


class FunctionEntry(Record, frozen=True):
    """A function that tasks are made from, and what watches over it."""

    package: str
    path: str
    qualname: str
    tests: tuple[str, ...]
    """Ids of the tests that reach it, quick and steady."""
    calls: tuple[tuple[str, str], ...]
    """Expression over the module's names, canonical text of its result on the healthy version."""


class TaskEntry(Record, frozen=True):
    function: int
    """Index into the manifest's functions."""
    operator: str
    start: int
    """Offset of the fault in the healthy file, in characters."""
    old: str
    new: str
    fail: tuple[int, ...]
    """Indices of the function's tests that the fault breaks."""
    shown: tuple[int, ...]
    """Of those, the ones that the agent sees."""
    digest: str = ""
    """First 16 digits of the digest of task, workspace and verifier."""


class Manifest(Record, frozen=True):
    name: str
    seed: int
    split_seed: int
    python: str
    """Version of the interpreter that it was made with."""
    packages: tuple[PackagePin, ...]
    functions: tuple[FunctionEntry, ...]
    tasks: tuple[TaskEntry, ...]


def split_of(module: str, seed: int) -> Split:
    """By hash of the module's name, so that no module is in two splits."""
    point = int.from_bytes(hashlib.sha256(f"{seed}/{module}".encode()).digest()[:8], "big") / 2**64
    total = 0.0
    for split, share in SHARES.items():
        total += share
        if point < total:
            return split
    return "heldout"


def best_split_seed(modules: Sequence[str], seed: int, num_seeds: int = 2000) -> int:
    """The first seed from `seed` on whose split of these tasks (named by module) is nearest to `SHARES`.

    Chosen by the sizes alone, before anything was trained or solved.
    """
    counts = {module: modules.count(module) for module in sorted(set(modules))}

    def distance(candidate: int) -> float:
        sizes = dict.fromkeys(SHARES, 0)
        kinds = dict.fromkeys(SHARES, 0)
        for module, count in counts.items():
            sizes[split_of(module, candidate)] += count
            kinds[split_of(module, candidate)] += 1
        return sum(
            abs(sizes[split] / len(modules) - share) + 0.5 * abs(kinds[split] / len(counts) - share)
            for split, share in SHARES.items()
        )

    return min(range(seed, seed + num_seeds), key=lambda candidate: (round(distance(candidate), 9), candidate))


def layer_of(requirements: Sequence[str] = ()) -> Layer:
    """The interpreter and pytest of this installation, with `requirements` and all that they need, spelled out.

    Raises `TaskError` where one is not installed here.
    """
    versions: dict[str, str] = {}
    waiting = ["pytest", *requirements]
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in versions:
            continue
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise TaskError(f"the package needs {name}, which is not installed here: pip install {name}") from error
        versions[name] = found.version
        for requirement in found.requires or ():
            text, _, marker = requirement.partition(";")
            if not marker or _applies(marker):
                word = text.strip()
                end = next((at for at, letter in enumerate(word) if not (letter.isalnum() or letter in "-_.")), None)
                waiting.append(word[:end])
    packages = tuple(sorted(f"{name}=={version}" for name, version in versions.items()))
    return Layer(python=platform.python_version(), packages=packages)


def _applies(marker: str) -> bool:
    from packaging.markers import Marker

    return Marker(marker).evaluate({"extra": ""})


def dump(manifest: Manifest) -> str:
    """JSON with sorted keys, a function or a task a line."""
    plain: dict[str, Any] = msgspec.to_builtins(manifest)
    lines = ["{"]
    for key in sorted(plain):
        value = plain[key]
        if isinstance(value, list | tuple):
            rows = ",\n".join("  " + _compact(row) for row in value)
            lines.append(f'"{key}": [\n{rows}\n],')
        else:
            lines.append(f'"{key}": {json.dumps(value)},')
    lines[-1] = lines[-1].removesuffix(",")
    return "\n".join([*lines, "}"]) + "\n"


def _compact(row: Any) -> str:
    return json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def load_manifest(path: Path) -> Manifest:
    """Raises `TaskError` where the file is missing or is no manifest."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as error:
        raise TaskError(f"cannot read the manifest {path}: {error.strerror}") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise TaskError(f"{path} is no task manifest: {error}") from error
