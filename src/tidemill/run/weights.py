"""`tidemill weights …`: deltas between folders by hand, and a look into a store."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar

from rich.progress import track

from tidemill.core.errors import BlobError, StoreError, UsageError
from tidemill.core.seams import Weights
from tidemill.deltas.codec import Mode, apply_stream, diff_stream, read_header
from tidemill.deltas.folders import SafetensorsFolder, write_folder
from tidemill.deltas.remote import ObjectStore, open_store
from tidemill.deltas.retention import collect, collected
from tidemill.deltas.store import FolderStore

T = TypeVar("T")


def diff_command(arguments: argparse.Namespace) -> int:
    old, new = SafetensorsFolder(Path(arguments.old)), SafetensorsFolder(Path(arguments.new))
    out = Path(arguments.out)
    with _whole_file(out) as file:
        mode: Mode = "overwrite" if arguments.overwrite else "differential"
        parts = list(_track(diff_stream(old, new, file, mode=mode, threads=_threads(arguments)), "diff", len(new)))
    size = out.stat().st_size
    if arguments.json:
        rows = [{"name": p.name, "weights": p.num_weights, "bytes": p.num_bytes, "codings": p.codings} for p in parts]
        print(json.dumps({"bytes": size, "of_bytes": new.num_bytes, "tensors": rows}))
    else:
        same = sum(set(part.codings) <= {"same"} for part in parts)
        share = 100 * size / max(new.num_bytes, 1)
        print(f"{out}: {size:,} bytes, {share:.3f} % of {new.num_bytes:,}; {same} of {len(parts)} tensors unchanged")
    return 0


def apply_command(arguments: argparse.Namespace) -> int:
    base, out = Path(arguments.base), Path(arguments.out)
    old = SafetensorsFolder(base)
    with open(arguments.delta, "rb") as file:
        _, _, entries, _ = read_header(file)
        file.seek(0)
        tensors = apply_stream(file, old, threads=_threads(arguments))
        write_folder(out, entries, _track(tensors, "apply", len(entries)), side=base)
    print(f"{out}: {len(entries)} tensors, each with the hash that the delta names; other files are those of {base}")
    return 0


def log_command(arguments: argparse.Namespace) -> int:
    store = _store(arguments.store)
    rows = list(_rows(store, moved=arguments.moved))
    if arguments.json:
        print(json.dumps(rows))
        return 0
    print(f"{'version':>7}  {'kind':5}  {'bytes':>13}  {'of keyframe':>11}  {'moved':>8}  {'step':>7}  published")
    for row in rows:
        share = "" if row["of_keyframe"] is None else f"{100 * row['of_keyframe']:.3f} %"
        moved = "" if row["moved"] is None else f"{100 * row['moved']:.3f} %"
        since = "" if row["since_s"] is None else f" (+{row['since_s']:.1f} s)"
        print(
            f"{row['version']:7}  {row['kind']:5}  {row['bytes']:13,}  {share:>11}  {moved:>8}  {row['step']:7}  "
            f"{row['published']}{since}"
        )
    return 0


def _rows(store: FolderStore | ObjectStore, *, moved: bool) -> Iterator[dict[str, Any]]:
    keyframe_bytes: int | None = None
    last_s: float | None = None
    before: Weights | None = None
    gone = _collected(store)
    for version in _track(store.versions(), "log") if moved else store.versions():
        manifest = store.manifest(version)
        if manifest.kind == "full":
            keyframe_bytes = manifest.num_bytes
        at_s = store.published_s(version)
        share: float | None = None
        if moved:
            weights = _load(store, version, gone)
            share = None if before is None or weights is None else _moved(before, weights)
            before = weights
        yield {
            "version": version,
            "kind": manifest.kind,
            "bytes": manifest.num_bytes,
            "of_keyframe": manifest.num_bytes / keyframe_bytes if keyframe_bytes else None,
            "moved": share,
            "step": manifest.step,
            "published": datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds"),
            "since_s": None if last_s is None else at_s - last_s,
        }
        last_s = at_s


def _moved(before: Weights, after: Weights) -> float:
    """The share of weights whose bits differ."""
    pairs = [(before.tensors[name].numpy(), array.numpy()) for name, array in after.tensors.items()]
    return sum(int((a != b).sum()) for a, b in pairs) / max(sum(a.size for a, _ in pairs), 1)


def verify_command(arguments: argparse.Namespace) -> int:
    """Every version by its chain, every tensor by its hash. Exit code 1 where one is not what its manifest says."""
    store = _store(arguments.store)
    gone = _collected(store)
    problems = []
    num_collected = 0
    versions = store.versions()
    for version in _track(versions, "verify"):
        try:
            num_collected += _load(store, version, gone) is None
        except (StoreError, BlobError) as error:
            problems.append(str(error))
    for problem in problems:
        print(problem, file=sys.stderr)
    num_whole = len(versions) - len(problems) - num_collected
    told = f", {num_collected} were collected" if num_collected else ""
    print(f"{store}: {num_whole} of {len(versions)} versions are whole{told}")
    return 1 if problems else 0


def collect_command(arguments: argparse.Namespace) -> int:
    store = _store(arguments.store)
    if not isinstance(store, FolderStore):
        raise UsageError(f"{store} is no folder: an object store deletes by life-cycle rules of its own")
    done = collect(store, keep=arguments.keep, pins=frozenset(arguments.pin), dry_run=arguments.dry_run)
    would = "would be " if arguments.dry_run else ""
    print(
        f"{store}: {done.num_blobs} payloads, {done.num_bytes:,} bytes {would}deleted; "
        f"versions from {done.horizon} on can be read"
    )
    return 0


def _collected(store: FolderStore | ObjectStore) -> frozenset[int]:
    return collected(store) if isinstance(store, FolderStore) else frozenset()


def _load(store: FolderStore | ObjectStore, version: int, gone: frozenset[int]) -> Weights | None:
    """None for a version that was collected, where it can no longer be read."""
    try:
        return store.load(version)
    except StoreError:
        if version in gone:
            return None
        raise


def pull_command(arguments: argparse.Namespace) -> int:
    store = _store(arguments.store)
    version = store.head() if arguments.version is None else arguments.version
    if version is None:
        raise StoreError(f"{store} holds no version yet")
    store.export(version, Path(arguments.out))
    print(f"{arguments.out}: version {version}")
    return 0


def _store(path: str) -> FolderStore | ObjectStore:
    if "://" not in path and not (Path(path) / "versions").is_dir():
        raise UsageError(f"{path} is no weight store: give a folder that holds versions/, such as runs/demo/store")
    return open_store(path)


def _threads(arguments: argparse.Namespace) -> int:
    return int(arguments.threads) or len(os.sched_getaffinity(0))


def _track(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """A progress bar on a terminal, nothing elsewhere."""
    return track(items, description=what, total=total, transient=True) if sys.stderr.isatty() else items


@contextmanager
def _whole_file(path: Path) -> Iterator[IO[bytes]]:
    """The file appears under its name when all of it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
