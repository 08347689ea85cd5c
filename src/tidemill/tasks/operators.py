"""Mutation operators: small faults as exact text edits, placed by the syntax tree.

A mutation replaces one short span of one line (or takes one line away) and leaves every other byte as it is. Nothing
here runs code or knows of packages, so that the same operators serve task synthesis and pre-training on any source.
After the procedural modifications of SWE-smith (arXiv 2504.21798), without those that rewrite whole blocks.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tidemill.core.errors import TaskError
from tidemill.core.records import Record
from tidemill.tasks.spans import FunctionNode, FunctionSpan, Text, parse, span_of, walk_functions


class Mutation(Record, frozen=True):
    """One fault: `source[start:end] == old` becomes `new`. Offsets are in characters of the whole source."""

    operator: str
    line: int
    """1-based line of the source that it changes."""
    start: int
    end: int
    old: str
    new: str


class _Edit(NamedTuple):
    operator: str
    start: int
    end: int
    new: str
    near: int


def sites(source: str, function: str | None = None, *, verify: bool = True) -> list[Mutation]:
    """All mutations of a function (by qualified name, such as `Ring.add`), or of every function of the source.

    In order of place. Each one parses and gives another syntax tree; without `verify` (which costs most of the time)
    a few may not. Raises `TaskError` where the source cannot be parsed or has no such function.
    """
    text = Text(source)
    found: list[Mutation] = []
    nodes = [item for item in walk_functions(parse(source), "") if function is None or item[0] == function]
    if function is not None and not nodes:
        raise TaskError(f"no function {function!r} in this source")
    for name, node in nodes:
        edits = {edit for operator in _OPERATORS for edit in operator(text, node)}
        mutations = [_mutation(text, edit) for edit in sorted(edits)]
        found += _differing(source, span_of(text, name, node), mutations) if verify else mutations
    return sorted(found, key=lambda item: (item.start, item.end, item.operator, item.new))


def _mutation(text: Text, edit: _Edit) -> Mutation:
    return Mutation(
        operator=edit.operator,
        line=text.line_of(edit.start, edit.near),
        start=edit.start,
        end=edit.end,
        old=text.source[edit.start : edit.end],
        new=edit.new,
    )


def apply(source: str, mutation: Mutation) -> str:
    """The source with the fault. Raises `TaskError` where the mutation does not belong to this source."""
    if source[mutation.start : mutation.end] != mutation.old:
        raise TaskError(f"the mutation expects {mutation.old!r} at {mutation.start}: it belongs to another source")
    return source[: mutation.start] + mutation.new + source[mutation.end :]


def inverse(mutation: Mutation) -> Mutation:
    """The repair: `apply(apply(source, m), inverse(m)) == source`."""
    return Mutation(
        operator=mutation.operator,
        line=mutation.line,
        start=mutation.start,
        end=mutation.start + len(mutation.new),
        old=mutation.new,
        new=mutation.old,
    )


def _differing(source: str, span: FunctionSpan, mutations: Sequence[Mutation]) -> list[Mutation]:
    """Those with a syntax tree of their own. Parses the function alone: a whole file per mutation would be slow."""
    before = source[span.start : span.end]
    head = "if 1:\n" if before[:1] in (" ", "\t") else ""

    def tree(text: str) -> str | None:
        try:
            return ast.dump(parse(head + text))
        except TaskError:
            return None

    gold = tree(before)
    kept = []
    for item in mutations:
        after = before[: item.start - span.start] + item.new + before[item.end - span.start :]
        if tree(after) not in (None, gold):
            kept.append(item)
    return kept


# --- operators -----------------------------------------------------------------------------------------------


def _nodes(function: FunctionNode) -> list[ast.AST]:
    """Of the body: no annotations, no docstring, no f-string insides (whose positions Python 3.11 gets wrong)."""
    found: list[ast.AST] = []
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    stack: list[ast.AST] = [*reversed(body)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.JoinedStr):
            continue
        found.append(node)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST):
                    stack.append(item)
    return found


_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">", ">="),
    ast.LtE: ("<", ">="),
    ast.Gt: (">=", "<", "<="),
    ast.GtE: (">", "<="),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_COMPARISON_TEXT: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+", "//")),
    ast.Div: ("/", ("*", "//")),
    ast.FloorDiv: ("//", ("/", "%")),
    ast.Mod: ("%", ("//",)),
    ast.Pow: ("**", ("*",)),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
    ast.BitXor: ("^", ("&",)),
}
MAX_SPAN_CHARS = 60
"""Of what a fault replaces."""
CALLS: dict[str, str] = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "startswith": "endswith",
    "endswith": "startswith",
    "lower": "upper",
    "upper": "lower",
    "lstrip": "rstrip",
    "rstrip": "lstrip",
    "find": "rfind",
    "rfind": "find",
    "split": "rsplit",
    "rsplit": "split",
    "partition": "rpartition",
    "rpartition": "partition",
    "append": "extend",
    "extend": "append",
    "popleft": "pop",
    "union": "intersection",
    "intersection": "union",
    "floor": "ceil",
    "ceil": "floor",
    "takewhile": "dropwhile",
    "dropwhile": "takewhile",
    "filter": "filterfalse",
    "filterfalse": "filter",
}


def _between(text: Text, left: ast.AST, right: ast.AST, word: str) -> tuple[int, int] | None:
    """The operator between two neighbours; None where a comment or a line break could be mistaken for it."""
    start, end = text.span(left)[1], text.span(right)[0]
    gap = text.source[start:end]
    pattern = r"[\s()\\]*(" + r"\s+".join(re.escape(part) for part in word.split()) + r")[\s()\\]*"
    match = re.fullmatch(pattern, gap)
    if match is None or "\n" in match[1]:
        return None
    return start + match.start(1), start + match.end(1)


def _comparison(text: Text, function: FunctionNode) -> Iterator[_Edit]:
    for node in _nodes(function):
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, kind, right in zip(operands[:-1], node.ops, operands[1:], strict=True):
                place = _between(text, left, right, _COMPARISON_TEXT[type(kind)])
                for new in _COMPARISONS[type(kind)] if place else ():
                    assert place is not None
                    yield _Edit("comparison", *place, new, left.lineno)


def _arithmetic(text: Text, function: FunctionNode) -> Iterator[_Edit]:
    for node in _nodes(function):
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            word, others = _ARITHMETIC[type(node.op)]
            if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant | ast.JoinedStr):
                continue
            place = _between(text, node.left, node.right, word)
            for new in others if place else ():
                assert place is not None
                yield _Edit("arithmetic", *place, new, node.left.lineno)
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            word, others = _ARITHMETIC[type(node.op)]
            place = _between(text, node.target, node.value, word + "=")
            if place:
                yield _Edit("arithmetic", *place, others[0] + "=", node.lineno)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            start, end = text.span(node)
            yield from _one_line(text, "arithmetic", (start, end), text.segment(node.operand), node.lineno)


def _boolean(text: Text, function: FunctionNode) -> Iterator[_Edit]:
    for node in _nodes(function):
        if isinstance(node, ast.BoolOp):
            word, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values[:-1], node.values[1:], strict=True):
                place = _between(text, left, right, word)
                if place:
                    yield _Edit("boolean", *place, new, left.lineno)


def _negation(text: Text, function: FunctionNode) -> Iterator[_Edit]:
    for node in _nodes(function):
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start, end = text.span(node)
            yield from _one_line(text, "dropped_not", (start, end), text.segment(node.operand), node.lineno)
        elif isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            test = node.test
            if isinstance(test, ast.Name | ast.Call | ast.Attribute | ast.Subscript):
                start, end = text.span(test)
                yield from _one_line(text, "negated_condition", (start, end), "not " + text.segment(test), test.lineno)


def _constant(text: Text, function: FunctionNode) -> Iterator[_Edit]:
    nodes: list[ast.AST] = [*_nodes(function), *function.args.defaults]
    nodes += [default for default in function.args.kw_defaults if default is not None]
    for node in nodes:
        if not isinstance(node, ast.Constant):
            continue
        start, end = text.span(node)
        if node.value is True or node.value is False:
            yield _Edit("boolean_constant", start, end, str(not node.value), node.lineno)
        elif type(node.value) is int and re.fullmatch(r"0|[1-9]\d{0,8}", text.source[start:end]):
            yield _Edit("constant", start, end, str(node.value + 1), node.lineno)
            if node.value > 0:
                yield _Edit("constant", start, end, str(node.value - 1), node.lineno)


def _locals(function: FunctionNode) -> list[str]:
    """Parameters, then assigned names, in order of place."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names = [item.arg for item in named if item.arg not in ("self", "cls")]
    stores = [node for node in _nodes(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    names += [node.id for node in sorted(stores, key=lambda node: (node.lineno, node.col_offset)) if node.id != "_"]
    return list(dict.fromkeys(names))


def _wrong_name(text: Text, function: FunctionNode) -> Iterator[_Edit]:
    names = _locals(function)
    returned = {id(node.value) for node in _nodes(function) if isinstance(node, ast.Return)}
    for node in _nodes(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
            at = names.index(node.id)
            operator = "wrong_return" if id(node) in returned else "wrong_name"
            for other in [*names[max(0, at - 1) : at], *names[at + 1 : at + 2]]:
                yield _Edit(operator, *text.span(node), other, node.lineno)


def _call(text: Text, function: FunctionNode) -> Iterator[_Edit]:
    for node in _nodes(function):
        if not isinstance(node, ast.Call):
            continue
        name = node.func
        if isinstance(name, ast.Name | ast.Attribute):
            word = name.id if isinstance(name, ast.Name) else name.attr
            end = text.span(name)[1]
            if word in CALLS and text.source[end - len(word) : end] == word:
                yield _Edit("swapped_call", end - len(word), end, CALLS[word], name.lineno)
        for left, right in zip(node.args[:-1], node.args[1:], strict=True):
            if isinstance(left, ast.Starred) or isinstance(right, ast.Starred):
                continue
            start, left_end = text.span(left)
            right_start, end = text.span(right)
            new = text.source[right_start:end] + text.source[left_end:right_start] + text.source[start:left_end]
            yield from _one_line(text, "swapped_arguments", (start, end), new, left.lineno)


def _index(text: Text, function: FunctionNode) -> Iterator[_Edit]:
    for node in _nodes(function):
        if not isinstance(node, ast.Subscript):
            continue
        bounds = [node.slice.lower, node.slice.upper] if isinstance(node.slice, ast.Slice) else [node.slice]
        for bound in bounds:
            if isinstance(bound, ast.Name) and isinstance(node.ctx, ast.Load) and isinstance(node.slice, ast.Slice):
                start, end = text.span(bound)
                yield _Edit("off_by_one", start, end, f"{bound.id} + 1", bound.lineno)
                yield _Edit("off_by_one", start, end, f"{bound.id} - 1", bound.lineno)
        if isinstance(node.slice, ast.Slice) and node.slice.lower is not None and node.slice.upper is None:
            start, end = text.span(node.slice.lower)
            if node.slice.step is None:
                yield _Edit("swapped_slice", start, end + 1, ":" + text.source[start:end], node.slice.lower.lineno)
        elif isinstance(node.slice, ast.Slice) and node.slice.upper is not None and node.slice.lower is None:
            start, end = text.span(node.slice.upper)
            if node.slice.step is None and text.source[start - 1] == ":":
                yield _Edit("swapped_slice", start - 1, end, text.source[start:end] + ":", node.slice.upper.lineno)


def _statement(text: Text, function: FunctionNode) -> Iterator[_Edit]:
    for node in _nodes(function):
        if isinstance(node, ast.Break | ast.Continue):
            new = "continue" if isinstance(node, ast.Break) else "break"
            yield _Edit("loop_exit", *text.span(node), new, node.lineno)
        elif isinstance(node, ast.IfExp):
            start, end = text.span(node)
            one, other = text.span(node.body), text.span(node.orelse)
            source = text.source
            new = source[other[0] : other[1]] + source[one[1] : other[0]] + source[one[0] : one[1]]
            if one[0] == start and other[1] == end:
                yield from _one_line(text, "swapped_branches", (start, end), new, node.lineno)
    for block in _blocks(function):
        for statement in block if len(block) > 1 else ():
            if (
                isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr)
                and statement.lineno == statement.end_lineno
            ):
                start, end = text.starts[statement.lineno - 1], text.starts[statement.lineno]
                if text.source[start:end].strip() == text.segment(statement) and text.source[end - 1] == "\n":
                    yield _Edit("removed_line", start, end, "", statement.lineno)


def _blocks(function: FunctionNode) -> Iterator[list[ast.stmt]]:
    for node in [function, *_nodes(function)]:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and block:
                documented = isinstance(node, FunctionNode) and ast.get_docstring(node, clean=False) is not None
                yield block[1:] if documented and field == "body" else block


def _one_line(text: Text, operator: str, span: tuple[int, int], new: str, near: int) -> Iterator[_Edit]:
    """Spans of one line and moderate length only: a repair must fit one edit."""
    old = text.source[span[0] : span[1]]
    if "\n" not in old and len(old) <= MAX_SPAN_CHARS:
        yield _Edit(operator, *span, new, near)


_OPERATORS: tuple[Callable[[Text, FunctionNode], Iterator[_Edit]], ...] = (
    _comparison,
    _arithmetic,
    _boolean,
    _negation,
    _constant,
    _wrong_name,
    _call,
    _index,
    _statement,
)
