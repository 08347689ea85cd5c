"""Which inner loops the codec uses: the compiled ones where numba is installed, else the plain ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from tidemill.deltas import plain


@dataclass(frozen=True)
class Kernels:
    """The functions of `plain`, each from there or from `compiled`."""

    class_counts: Callable[..., Any]
    ranks: Callable[..., Any]
    positions: Callable[..., Any]
    quotients: Callable[..., Any]
    fields: Callable[..., Any]
    values: Callable[..., Any]


@cache
def kernels(compile_loops: bool | None = None) -> Kernels:
    """True: numba; False: numpy; None: numba where it is installed (the extra `fast`)."""
    names = Kernels.__dataclass_fields__
    if compile_loops or (compile_loops is None and find_spec("numba") is not None):
        from tidemill.deltas import compiled

        return Kernels(**{name: getattr(compiled, name) for name in names})
    return Kernels(**{name: getattr(plain, name) for name in names})
