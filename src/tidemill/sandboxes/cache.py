"""Folders that sandboxes are made from, built once and then only read: environment layers, repositories, small files.

A folder is built aside and renamed, so a half-built one is never seen, and it brings a list of its files, so a damaged
one is noticed and built again. Any number of processes may share the cache.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from tidemill.core.errors import SandboxError, SandboxUnavailable

MANIFEST = ".files"
NUM_SLOTS = 4096


def default_root() -> Path:
    """`$TIDEMILL_CACHE`, or a folder of this user that other users can pass through (a home folder often cannot)."""
    named = os.environ.get("TIDEMILL_CACHE")
    return Path(named).absolute() if named else Path(f"/var/tmp/tidemill-{os.geteuid()}")


@final
class Cache:
    """The cache of this user on this machine. Making the object touches nothing."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or default_root()
        self._sound: set[Path] = set()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Make the root. Raises `SandboxUnavailable` where another user could write into it, or where the users that
        sandboxes run as could not reach it."""
        mend = "set TIDEMILL_CACHE to a folder that only you can write and everyone can enter, such as /var/tmp/NAME"
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            info = os.lstat(self.root)
        except OSError as error:
            raise SandboxUnavailable(f"cannot make the cache folder {self.root}: {error.strerror}; {mend}") from error
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise SandboxUnavailable(f"the cache folder {self.root} is not yours alone; {mend}")
        if os.geteuid() == 0:
            for folder in (self.root, *self.root.resolve().parents):
                if not folder.stat().st_mode & 0o001:
                    raise SandboxUnavailable(f"{folder}, above the cache, cannot be entered by other users; {mend}")

    def folder(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(mode=0o755, exist_ok=True)
        return path

    def is_sound(self, kind: str, name: str) -> Path | None:
        """The folder, where this process has already found it whole. Dates it: see `prune`."""
        path = self.root / kind / name
        if path not in self._sound:
            return None
        if not _date(path):  # someone has cleared the cache
            with self._lock:
                self._sound.discard(path)
            return None
        return path

    def prune(self, kind: str, max_age_s: float) -> int:
        """Remove folders that no one has used for so long; returns how many."""
        removed = 0
        for path in self.folder(kind).iterdir():
            with contextlib.suppress(OSError):
                if path.is_dir() and time.time() - path.stat().st_mtime > max_age_s:
                    shutil.rmtree(path)
                    (path.parent / f".{path.name}.lock").unlink(missing_ok=True)
                    removed += 1
        return removed

    def build(self, kind: str, name: str, make: Callable[[Path], None]) -> Path:
        """The folder `kind/name`, made by `make(folder)` if it is missing or damaged. Blocks while another process
        builds the same one. Raises `SandboxUnavailable` where the disk is full, with nothing left."""
        target = self.folder(kind) / name
        if target in self._sound:
            return target
        try:
            with self._exclusive(target):
                if not _is_whole(target):
                    _rebuild(target, make)
                _date(target)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SandboxUnavailable(
                    f"no space for {target}: free some on that disk, or set TIDEMILL_CACHE to a folder on another"
                ) from error
            raise SandboxError(f"cannot build {target}: {error}") from error
        with self._lock:
            self._sound.add(target)
        return target

    @contextmanager
    def _exclusive(self, target: Path) -> Iterator[None]:
        path = target.parent / f".{target.name}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _date(path: Path) -> bool:
    """Note that it is used. False where it is not there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except PermissionError:  # a cache that someone else has filled for us
        return True
    return True


def _rebuild(target: Path, make: Callable[[Path], None]) -> None:
    for leftover in target.parent.glob(f".{target.name}.part-*"):  # of a builder that was killed: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    if target.exists():
        shutil.rmtree(target)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
    try:
        part.chmod(0o755)
        make(part)
        lines = [f"{size} {name}" for name, size in sorted(_sizes(part))]
        (part / MANIFEST).write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    for here, _, files in os.walk(folder):
        for file in files:
            path = os.path.join(here, file)
            info = os.lstat(path)
            if stat.S_ISREG(info.st_mode) and file != MANIFEST:
                yield os.path.relpath(path, folder), info.st_size


def _is_whole(target: Path) -> bool:
    """Every file is there, with its size: what a crash of the machine or a cleaner of old files would break."""
    try:
        lines = (target / MANIFEST).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        for line in lines:
            size, _, name = line.partition(" ")
            if os.lstat(target / name).st_size != int(size):
                return False
    except (OSError, ValueError):
        return False
    return True


def first_slot_uid(uid_map: str | None = None) -> int:
    """The lowest id of `NUM_SLOTS` that sandboxes may have: far above what distributions, containers and
    `systemd-nspawn` hand out; or, where we are root of a container with fewer ids, the highest that it has."""
    text = Path("/proc/self/uid_map").read_text() if uid_map is None else uid_map
    end = max((int(line.split()[0]) + int(line.split()[2]) for line in text.splitlines()), default=1)
    return max(1, min(1_900_000_000, end - NUM_SLOTS))


@final
class Slots:
    """User ids for sandboxes, one per live sandbox, when we are root; a lock file each, so that no other process on
    this machine uses the same one. An ordinary user has one id only, and every sandbox has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: list[int] = []
        self._held: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self) -> int | None:
        if os.geteuid() != 0:
            return None
        with self._lock:
            if self._free:
                self._free.sort()
                return self._free.pop(0)
            first = first_slot_uid()
            for uid in range(first, first + NUM_SLOTS):
                if uid not in self._held and (fd := _try_lock(self._folder / str(uid))) is not None:
                    self._held[uid] = fd
                    return uid
        raise SandboxError(f"all {NUM_SLOTS} sandbox user ids are in use: close sandboxes")

    def give_back(self, uid: int | None) -> None:
        if uid is not None:
            with self._lock:
                self._free.append(uid)

    def close(self) -> None:
        with self._lock:
            for fd in self._held.values():
                os.close(fd)
            self._held.clear()
            self._free.clear()


def _try_lock(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
