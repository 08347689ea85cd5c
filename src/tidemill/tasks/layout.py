"""What of a repository is source, what is tests, and which parts a workspace or a verifier is made of."""

import ast
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from tidemill.core.errors import TaskError
from tidemill.core.records import Record, Tree, TreeFile
from tidemill.tasks.packages import Files
from tidemill.tasks.spans import FunctionNode, Text, parse

MAX_DATA_BYTES = 100_000
_NOT_MODULES = {"setup", "conftest", "noxfile", "tasks", "fabfile", "versioneer", "runtests", "ez_setup"}
_DATA_SUFFIXES = {".json", ".txt", ".csv", ".yaml", ".yml", ".toml", ".typed", ".dat", ".html", ".xml", ".ini"}


class Layout(Record, frozen=True):
    """A repository, reduced to what its tests need. Every path keeps its place."""

    sources: dict[str, str]
    """Path of a module → its text."""
    tests: dict[str, str]
    """Path of a test file, or of a `conftest.py` or `__init__.py` beside it → its text."""
    data: dict[str, bytes]
    """Other small files of the packages and the tests."""


def module_name(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_test_path(path: str) -> bool:
    pure = PurePosixPath(path)
    if any(part in ("test", "tests", "testing") for part in pure.parts[:-1]):
        return True
    return bool(re.fullmatch(r"(test_.*|.*_test|tests?|conftest)\.py", pure.name))


def layout(files: Files, name: str) -> Layout:
    """Raises `TaskError` where there is no importable package, no test, or a module that is no Python."""
    tops = _package_tops(files)
    if not tops:
        raise TaskError(f"{name} has no importable package: expected a folder with __init__.py at the top or in src/")
    sources: dict[str, str] = {}
    tests: dict[str, str] = {}
    data: dict[str, bytes] = {}
    for path, content in sorted(files.items()):
        inside = any(path == top or path.startswith(top + "/") for top in tops)
        testing = is_test_path(path) and (inside or path.startswith(("test", "conftest")))
        if not inside and not testing:
            continue
        if path.endswith(".py"):
            text = _decode(path, content, name)
            (tests if testing else sources)[path] = text
        elif PurePosixPath(path).suffix in _DATA_SUFFIXES and len(content) <= MAX_DATA_BYTES:
            data[path] = content
    if not any(PurePosixPath(path).name != "conftest.py" and "def test" in text for path, text in tests.items()):
        raise TaskError(f"{name} has no tests: expected functions `test_*` in files `test_*.py`")
    for path, text in sources.items():
        try:
            parse(text)
        except TaskError as error:
            raise TaskError(f"{name}: {path} {error}") from error
    return Layout(sources=sources, tests=tests, data=data)


def _decode(path: str, content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise TaskError(f"{name}: {path} is not UTF-8: {error}") from error


def _package_tops(files: Files) -> list[str]:
    tops: list[str] = []
    for path in files:
        parts = path.split("/")
        if parts[0] == "src" and "src/__init__.py" not in files:
            parts = parts[1:]
            prefix = "src/"
        else:
            prefix = ""
        if len(parts) == 2 and parts[1] == "__init__.py" and not is_test_path(path):
            tops.append(prefix + parts[0])
        elif len(parts) == 1 and parts[0].endswith(".py") and not is_test_path(path):
            stem = parts[0].removesuffix(".py")
            if stem.isidentifier() and stem not in _NOT_MODULES and not stem.startswith("_"):
                tops.append(prefix + parts[0])
    return sorted(set(tops) - {"docs", "doc", "examples", "benchmarks", "bench", "tools", "scripts"})


def tree(*parts: dict[str, str] | dict[str, bytes]) -> Tree:
    """A snapshot; later parts stand over earlier ones."""
    merged: dict[str, bytes] = {}
    for part in parts:
        for path, content in part.items():
            merged[path] = content.encode() if isinstance(content, str) else content
    return Tree(files=tuple(TreeFile(path=path, data=merged[path]) for path in sorted(merged)))


def support_files(layout: Layout) -> dict[str, str]:
    """Test files that hold no tests: `conftest.py`, `__init__.py`, helpers."""
    return {path: text for path, text in layout.tests.items() if not _has_tests(path, text)}


def _has_tests(path: str, text: str) -> bool:
    name = PurePosixPath(path).name
    return name not in ("conftest.py", "__init__.py") and bool(
        re.search(r"^\s*(async\s+)?def test|^class Test", text, re.M)
    )


def cut_tests(text: str, wanted: Iterable[str], module: ast.Module | None = None) -> str:
    """A test file with only the test functions of these node ids (`path::Class::test[params]`).

    Everything else stays as it is, byte for byte: imports, helpers, fixtures. A class whose tests are all gone
    goes too, unless another class builds on it. `module`: the text's syntax tree, where it is known.
    """
    pairs = [_pair(id_) for id_ in wanted]
    source = Text(text)
    module = module or parse(text)
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    defined = {cls.name: {node.name for node in cls.body if isinstance(node, FunctionNode)} for cls in classes}
    bases = {base.id for cls in classes for base in cls.bases if isinstance(base, ast.Name)}

    def keeps(cls: str, name: str) -> bool:
        if (cls, name) in pairs:
            return True
        return bool(cls) and any(name == other and name not in defined.get(owner, ()) for owner, other in pairs)

    gone: list[ast.stmt] = []
    for node in module.body:
        if isinstance(node, FunctionNode) and node.name.startswith("test") and not keeps("", node.name):
            gone.append(node)
        elif isinstance(node, ast.ClassDef):
            tests = [item for item in node.body if isinstance(item, FunctionNode) and item.name.startswith("test")]
            dropped = [item for item in tests if not keeps(node.name, item.name)]
            empty = bool(tests) and len(dropped) == len(tests)
            if empty and node.name not in bases:
                gone.append(node)
            elif len(dropped) < len(node.body):
                gone += dropped
    lines = list(source.lines)
    for node in gone:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(item.lineno for item in decorators)])
        assert node.end_lineno is not None
        end = node.end_lineno
        while end < len(lines) and not source.lines[end].strip():
            end += 1
        lines[first - 1 : end] = [""] * (end - first + 1)
    return "".join(lines)


def _pair(node_id: str) -> tuple[str, str]:
    parts = node_id.split("[", 1)[0].split("::")
    return (parts[-2] if len(parts) > 2 else "", parts[-1])
