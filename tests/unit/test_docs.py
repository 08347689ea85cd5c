"""The documents name what exists."""

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 400, 80
LONG = {
    "src/tidemill/core/seams.py": "all protocols in one file, as the style asks",
}
"""Modules over the limit, with the reason. Keep it short."""


def test_papers_lead_to_functions_and_tests() -> None:
    rows = re.findall(r"\| `(tidemill[\w.]+)` \| `(tests/[\w/.]+)` \|", (ROOT / "docs/papers.md").read_text())
    assert len(rows) >= 8
    for name, test in rows:
        module, _, function = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function)), name
        assert function in (ROOT / test).read_text(), f"{test} never names {function}"


def test_the_first_command_is_near_the_top() -> None:
    assert any("make demo" in line for line in (ROOT / "README.md").read_text().splitlines()[:25])


def test_the_loops_stay_readable() -> None:
    assert (ROOT / "src/tidemill/run/loops.py").read_text().count("\n") <= 300


def test_modules_and_functions_stay_short() -> None:
    for path in sorted((ROOT / "src").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text()
        assert name in LONG or source.count("\n") <= MAX_MODULE_LINES, f"{name} has {source.count(chr(10))} lines"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= MAX_FUNCTION_LINES, f"{name}: {node.name} has {length} lines"
