"""What the host may ask of source text that a policy wrote: whether it parses, and whether two texts mean the same."""

import ast
import warnings
from typing import Any

_UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
_LAYOUT = frozenset({"lineno", "col_offset", "end_lineno", "end_col_offset", "type_comment", "kind"})


def syntax_error(source: str) -> str | None:
    """None where the text compiles, else what is wrong, as `line 12: invalid syntax`. Nothing is run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source.removeprefix("\ufeff"), "<edit>", "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    except _UNPARSABLE as error:
        return f"{type(error).__name__}: {error}"
    return None


def same_syntax(left: str, right: str) -> bool:
    """Whether the syntax trees are equal: layout and comments aside. False where a text does not parse."""
    if left == right:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _equal(ast.parse(left.removeprefix("\ufeff")), ast.parse(right.removeprefix("\ufeff")))
    except _UNPARSABLE:
        return False


def _equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, ast.AST):
        return all(
            _equal(getattr(left, name, None), getattr(right, name, None))
            for name in left._fields
            if name not in _LAYOUT
        )
    if isinstance(left, list):
        return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right, strict=True))
    return repr(left) == repr(right) if isinstance(left, float | complex) else bool(left == right)
