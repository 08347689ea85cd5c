"""Files that stand whole whenever a process is killed, or the disk is full."""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, data: bytes, *, like: os.stat_result | None = None) -> None:
    """Make or replace a file, durably: the old one or the new one stands, never a part. Readable by its owner alone;
    with `like`, of that mode, and of that owner where this user may say so.

    Raises `OSError` (disk full, …) with nothing left behind.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if like is not None:
                with suppress(PermissionError):
                    os.fchown(file.fileno(), like.st_uid, like.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(like.st_mode))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def drop_cut_off_line(path: Path) -> None:
    """A writer of lines that was killed leaves half of one; the next to hold the file takes it away."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
