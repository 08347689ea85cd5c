"""Files that stand whole whenever a process is killed, or the disk is full."""

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Make or replace a file, durably: the old one or the new one stands, never a part. Readable by its owner alone.

    Raises `OSError` (disk full, …) with nothing left behind.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
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
