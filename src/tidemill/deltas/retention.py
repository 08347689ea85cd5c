"""What of a store may be deleted, and deleting it, while others read and publish.

Payloads go, manifests stay: a store's history is kept, and what was published under a number can never be published
anew. A follower that lives (`api.follow`) says where it stands by a file, `followers/NAME`; nothing that it may still
need is deleted. One that was silent for longer than the grace period joins anew from the newest keyframe.

    STORE/followers/NAME    where a follower stands
    STORE/collected         the versions whose payloads were given up, so that they are not taken for damaged
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import final
from uuid import uuid4

from tidemill.core.blobs import lock_folder
from tidemill.core.errors import StoreError
from tidemill.core.files import write_whole
from tidemill.deltas.store import FolderStore, SnapshotStore

GRACE_S = 3600.0
"""A blob, or a follower's word, younger than this is never taken for a leftover."""
SAY_S = 300.0
"""A follower that `Standing` speaks for says where it stands at least so often."""


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


@final
class Standing:
    """Where one follower stands, as long as it lives. Silent where a store is no folder, or one that is only read."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store if isinstance(store, FolderStore) else None
        self._name = uuid4().hex
        self._said = (-1, 0.0)

    def at(self, version: int) -> None:
        """To be called at each look at the store. −1: nowhere yet."""
        said, said_s = self._said
        if self._store is None or version < 0 or (version == said and time.monotonic() - said_s < SAY_S):
            return
        self._said = (version, time.monotonic())
        with suppress(OSError):
            stand(self._store, self._name, version)

    def close(self) -> None:
        if self._store is not None:
            with suppress(OSError):
                os.unlink(self._store.folder / "followers" / self._name)


def collected(store: FolderStore) -> frozenset[int]:
    """Versions whose payloads were given up. Raises `StoreError` where the list of them cannot be read."""
    try:
        return frozenset(map(int, json.loads((store.folder / "collected").read_bytes())))
    except FileNotFoundError:
        return frozenset()
    except (ValueError, TypeError) as error:
        raise StoreError(f"the list of collected versions in {store} is damaged: {error}") from None


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
    the deltas and the keyframe that it rests on. A version that was given up once is not asked for again. Raises
    `StoreError` for a `keep` below 1, and where a manifest is damaged: then nothing is deleted.
    """
    if keep < 1:
        raise StoreError(f"keep is {keep}: the newest version is always kept")
    versions = store.versions()
    if not versions:
        return Collected(0, 0, 0)
    # Blobs first, manifests second: what is published in between is in the manifests, or its blobs are young.
    blobs = [path for path in (store.folder / "blobs").glob("[0-9a-f][0-9a-f]/*") if not path.name.startswith(".")]
    wanted = min([versions[max(len(versions) - keep, 0)], *_followers(store, grace_s, dry_run=dry_run)])
    gone = collected(store)
    manifests = {version: store.manifest(version) for version in store.versions() if version not in gone}
    needed: set[int] = set()
    for version in sorted({v for v in manifests if v >= wanted} | pins.intersection(manifests)):
        link: int | None = version
        while link is not None and link not in needed:
            needed.add(link)
            link = manifests[link].parent
    if not dry_run and needed != manifests.keys():
        write_whole(store.folder / "collected", json.dumps(sorted(gone | (manifests.keys() - needed))).encode())
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


def _followers(store: FolderStore, grace_s: float, *, dry_run: bool) -> list[int]:
    """Where the living stand; what the dead have left is taken away."""
    found = []
    folder = store.folder / "followers"
    for path in folder.glob("[!.]*"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if time.time() - path.stat().st_mtime < grace_s:
                found.append(max(int(json.loads(path.read_bytes())["version"]), 0))
            elif not dry_run:
                os.unlink(path)
    return found
