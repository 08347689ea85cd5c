"""Code to read before learning to mend: functions of the Python files on this machine.

What the policy will be examined on stays out: files of held-out modules, and, wherever a copy of one lies on the
machine (vendored, installed), every function whose syntax tree equals one of theirs.
"""

import ast
import hashlib
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "testing", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "__pycache__", "site-packages"}
)


@dataclass(frozen=True, kw_only=True)
class CodeFunction:
    """One function of a real file."""

    path: str
    """Relative to the root that it was found under."""
    name: str
    source: str
    """Dedented lines, without the decorators, ending in a newline."""


def functions_of(source: str, path: str, *, max_lines: int, max_chars: int) -> Iterator[CodeFunction]:
    """The functions and methods of a file that fit the window. A file that does not parse yields none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        body = lines[node.lineno - 1 : node.end_lineno]
        text = "".join(line[node.col_offset :] if line[: node.col_offset].isspace() else line for line in body)
        if not text.endswith("\n"):
            text += "\n"
        if 2 < len(body) <= max_lines and len(text) <= max_chars:
            yield CodeFunction(path=path, name=node.name, source=text)


def syntax_digest(source: str) -> str | None:
    """Equal for functions that differ in layout, comments and docstring only; None where it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _read(files: Iterable[tuple[Path, Path]]) -> Iterator[tuple[str, str]]:
    """Name and source; what cannot be read is left out."""
    for root, path in files:
        try:
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue


def machine_roots() -> list[Path]:
    """Where Python code lies on this machine: the standard library and what is installed beside Tidemill."""
    paths = sysconfig.get_paths()
    return [Path(paths["stdlib"]), Path(paths["purelib"])]


def python_files(roots: Iterable[Path], *, max_files: int, seed: int) -> list[tuple[Path, Path]]:
    """(root, file) of up to `max_files` files in an order drawn from `seed`; suites of tests are left out."""
    found: list[tuple[Path, Path]] = []
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
            found += [
                (root, Path(folder, name))
                for name in sorted(names)
                if name.endswith(".py") and not name.startswith("test")
            ]
    random.Random(seed).shuffle(found)
    return found[:max_files]


def code_corpus(
    files: Iterable[tuple[Path, Path]],
    *,
    held_out: Iterable[str],
    max_functions: int,
    first: Iterable[tuple[str, str]] = (),
    max_lines: int = 40,
    max_chars: int = 1200,
) -> list[CodeFunction]:
    """Distinct functions of `files`, without any whose syntax tree occurs in the `held_out` sources.

    `held_out` are whole files. `first`: name and source of files to take before the others. Duplicates, by syntax tree,
    are kept once.
    """
    seen: set[str] = set()
    for source in held_out:
        for function in functions_of(source, "", max_lines=10**6, max_chars=10**9):
            if (digest := syntax_digest(function.source)) is not None:
                seen.add(digest)
    corpus: list[CodeFunction] = []
    for name, source in chain(first, _read(files)):
        for function in functions_of(source, name, max_lines=max_lines, max_chars=max_chars):
            digest = syntax_digest(function.source)
            if digest is not None and digest not in seen:
                seen.add(digest)
                corpus.append(function)
        if len(corpus) >= max_functions:
            break
    return corpus[:max_functions]
