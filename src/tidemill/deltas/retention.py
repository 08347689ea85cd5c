"""What of a store may be deleted, and deleting it, while others read and publish.

Payloads go, manifests stay: a store's history is kept, and what was published under a number can never be published
anew. A follower that lives says where it stands by a file, `followers/NAME`, which it touches; nothing that it may
still need is deleted. One that was silent for longer than the grace period joins anew from the newest keyframe.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass

from tidemill.core.blobs import lock_folder
from tidemill.core.errors import StoreError
from tidemill.core.files import write_whole
from tidemill.deltas.store import FolderStore

GRACE_S = 3600.0
"""A blob, or a follower's word, younger than this is never taken for a leftover."""


@dataclass(frozen=True)
class Collected:
    horizon: int
    """The oldest version that can still be read, but for the pinned ones."""
    num_blobs: int
    num_bytes: int


def stand(store: FolderStore, name: str, version: int) -> None:
    """A follower's word: it serves `version`, and reads from there on. Say it after each swap, and now and then."""
    if not name or not name.replace("-", "").replace("_", "").isalnum():
        raise StoreError(f"{name!r} cannot name a follower: give letters, digits, - and _")
    folder = store.folder / "followers"
    folder.mkdir(exist_ok=True)
    write_whole(folder / name, json.dumps({"version": version}).encode())


def collect(
    store: FolderStore,
    *,
    keep: int,
    pins: frozenset[int] = frozenset(),
    grace_s: float = GRACE_S,
    dry_run: bool = False,
) -> Collected:
    """Delete the payloads that no one needs.

    Needed are the newest `keep` versions, all since the oldest one at which a follower stands, and `pins`; each with
    the deltas and the keyframe that it rests on. Raises `StoreError` for a `keep` below 1, and where a manifest is
    damaged: then nothing is deleted.
    """
    if keep < 1:
        raise StoreError(f"keep is {keep}: the newest version is always kept")
    versions = store.versions()
    if not versions:
        return Collected(0, 0, 0)
    # Blobs first, manifests second: what is published in between is in the manifests, or its blobs are young.
    blobs = [path for path in (store.folder / "blobs").glob("[0-9a-f][0-9a-f]/*") if not path.name.startswith(".")]
    wanted = min([versions[max(len(versions) - keep, 0)], *_followers(store, grace_s)])
    manifests = {version: store.manifest(version) for version in store.versions()}
    needed: set[int] = set()
    for version in sorted({v for v in manifests if v >= wanted} | pins.intersection(manifests)):
        link: int | None = version
        while link is not None and link not in needed:
            needed.add(link)
            link = manifests[link].parent
    names = {blob for version in needed for blob in manifests[version].files.values()}
    num_blobs = num_bytes = 0
    for path in blobs:
        if path.parent.name + path.name in names:
            continue
        with suppress(FileNotFoundError), lock_folder(path.parent, alone=True):
            stat = path.stat()
            if time.time() - stat.st_mtime < grace_s:
                continue
            if not dry_run:
                os.unlink(path)
            num_blobs, num_bytes = num_blobs + 1, num_bytes + stat.st_size
    return Collected(min(v for v in needed if v not in pins or v >= wanted), num_blobs, num_bytes)


def _followers(store: FolderStore, grace_s: float) -> list[int]:
    found = []
    folder = store.folder / "followers"
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError, ValueError, KeyError, TypeError):
            if not path.name.startswith(".") and time.time() - path.stat().st_mtime < grace_s:
                found.append(max(int(json.loads(path.read_bytes())["version"]), 0))
    return found
