"""Where functions stand in Python source: between the syntax tree's positions and character offsets."""

import ast
import io
import warnings
from collections.abc import Iterator

from tidemill.core.errors import TaskError
from tidemill.core.records import Record

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class FunctionSpan(Record, frozen=True):
    """Where a function stands in its source; decorators are part of it."""

    qualname: str
    start_line: int
    """1-based."""
    end_line: int
    body_line: int
    """First line of the body that is not the docstring."""
    start: int
    """Character offset of the first line's start."""
    end: int
    """Character offset behind the last line, its newline included."""
    name_line: int
    """Line of `def`, which is what a code object calls its first line where there are no decorators."""


class Text:
    """Source with a fast way from the syntax tree's positions to character offsets."""

    def __init__(self, source: str) -> None:
        self.source = source
        # Not str.splitlines: the syntax tree counts only these as line ends, and treats a form feed as blank.
        self.lines = io.StringIO(source, newline="").readlines()
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def offset(self, lineno: int, col_bytes: int) -> int:
        line = self.lines[lineno - 1]
        col = col_bytes if line.isascii() else len(line.encode()[:col_bytes].decode())
        return self.starts[lineno - 1] + col

    def span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def segment(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def line_of(self, offset: int, near: int) -> int:
        line = near
        while line < len(self.lines) and self.starts[line] <= offset:
            line += 1
        return line


def parse(source: str) -> ast.Module:
    """The syntax tree. Raises `TaskError` where the source is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's escape sequences
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise TaskError(f"cannot be parsed as Python: {error}") from error


def functions(source: str, tree: ast.Module | None = None) -> list[FunctionSpan]:
    """All functions and methods of a source that are not inside another function, in order."""
    text = Text(source)
    return [span_of(text, name, node) for name, node in walk_functions(tree or parse(source), "")]


def same_tree(one: str, other: str) -> bool:
    """True where two sources have equal syntax trees, whatever their layout and comments."""
    return ast.dump(parse(one)) == ast.dump(parse(other))


def walk_functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, FunctionNode]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from walk_functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try):
            yield from walk_functions(child, prefix)


def span_of(text: Text, name: str, node: FunctionNode) -> FunctionSpan:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    assert node.end_lineno is not None
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return FunctionSpan(
        qualname=name,
        start_line=first,
        end_line=node.end_lineno,
        body_line=body[0].lineno if body else node.end_lineno,
        start=text.starts[first - 1],
        end=text.starts[node.end_lineno],
        name_line=node.lineno,
    )
