"""Repositories on disk: what a sandbox's workspace starts from, and the bytecode that spares it compiling."""

import importlib.util
import marshal
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tidemill.core.errors import UsageError
from tidemill.core.records import Tree

CHECKED_HASH = (3).to_bytes(4, "little")
"""Flags of bytecode that is valid as long as the source's hash is the same (PEP 552), whatever its times."""
UNCHECKED_HASH = (1).to_bytes(4, "little")


def check_path(path: str) -> str:
    """Raises `UsageError` for a path that is absolute, empty, or leaves the workspace."""
    parts = path.split("/")
    if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise UsageError(f"path {path!r}: use a relative path with '/' between names, without '.', '..' or empty names")
    return path


def unpack(tree: Tree, folder: Path, uid: int | None) -> None:
    """Write the files, as `uid`'s own: an overlay can be edited only by who owns what lies below."""
    folders = {folder}
    for file in tree.files:
        target = folder / check_path(file.path)
        if target.parent not in folders:
            target.parent.mkdir(parents=True, exist_ok=True)
            folders.update(p for p in target.parents if folder in p.parents)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if file.executable else 0o644)
        with os.fdopen(fd, "wb") as out:
            out.write(file.data)
            if uid is not None:
                os.fchown(out.fileno(), uid, uid)
    for each in folders:
        each.chmod(0o755)
        if uid is not None:
            os.chown(each, uid, uid)


def compile_tree(tree: Tree, folder: Path, seen_at: str) -> None:
    """Bytecode of the tree's modules, in `folder`, as `sys.pycache_prefix` wants it; `seen_at` is where the modules
    lie in the sandbox. A file that does not compile is left to whoever imports it."""
    compile_files(((f"{seen_at}/{f.path}", f.path, f.data) for f in tree.files if f.path.endswith(".py")), folder)


def compile_files(files: Iterable[tuple[str, str, bytes]], folder: Path) -> None:
    """Each file is (name inside the sandbox, path below `folder`, source)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sandbox's business, not ours
        for name, relative, source in files:
            try:
                code = compile(source, name, "exec", dont_inherit=True, optimize=0)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            data = CHECKED_HASH + importlib.util.source_hash(source) + marshal.dumps(code)
            write_bytecode(folder, relative, data)


def write_bytecode(folder: Path, relative: str, data: bytes) -> None:
    """`data` is all but the magic number."""
    path = PurePosixPath(relative)
    target = folder / path.parent / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(importlib.util.MAGIC_NUMBER + data)
