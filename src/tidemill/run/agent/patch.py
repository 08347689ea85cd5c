"""A mended file: as a diff, and into the user's folder."""

import difflib
import io
import os
import stat
from pathlib import Path

from tidemill.core.errors import TidemillError, UsageError
from tidemill.core.files import write_whole

NO_NEWLINE = "\\ No newline at end of file"


def unified_diff(path: str, before: str, after: str) -> str:
    """As `git apply` and `patch -p1` take it."""
    old, new = (io.StringIO(text, newline="\n").readlines() for text in (before, after))  # a form feed ends no line
    pieces = difflib.unified_diff(old, new, f"a/{path}", f"b/{path}")
    return "".join(piece if piece.endswith("\n") else f"{piece}\n{NO_NEWLINE}\n" for piece in pieces)


def apply(repo: Path, path: str, before: bytes, after: bytes) -> None:
    """Replace a file of the folder, whole or not at all, with its mode kept.

    Raises `TidemillError` where it is no longer what was read, or no longer a plain file of this folder.
    """
    target = repo.resolve() / path
    if target.parent.resolve() != target.parent:
        raise TidemillError(f"{target} is reached through a symbolic link now: nothing was written")
    try:
        handle = os.open(target, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise TidemillError(f"{target} is no plain file any more ({error.strerror}): nothing was written") from error
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or file.read() != before:
            raise TidemillError(f"{target} has changed since it was read: nothing was written; run the agent again")
    write_whole(target, after, like=found)


def path_inside(repo: Path, file: str) -> str:
    """`--file` as a path below the folder. Raises `UsageError` where it leads out of it, or through a link."""
    root = repo.resolve()
    asked = Path(os.path.normpath(root / file)) if not os.path.isabs(file) else Path(os.path.normpath(file))
    for base in (root, Path(os.path.abspath(repo))):
        if asked.is_relative_to(base):
            inside = asked.relative_to(base)
            break
    else:
        raise UsageError(f"--file {file!r} is outside of {root}: give a path below it")
    if not (root / inside).is_file():
        raise UsageError(f"--file {file!r} is no file of {root}")
    if (root / inside).resolve() != root / inside:
        raise UsageError(f"--file {file!r} is, or is reached through, a symbolic link: give the file itself")
    return inside.as_posix()
