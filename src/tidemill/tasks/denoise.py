"""Self-supervision for mending: plant a fault in a real function, and the way back is the lesson.

No test is run and no task is made; any function of any file serves, by the thousand.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tidemill.core.errors import TaskError
from tidemill.tasks.corpora import CodeFunction
from tidemill.tasks.operators import apply, sites
from tidemill.text.windows import edits_between


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A faulty function and the edits that mend it, in order."""

    path: str
    name: str
    faulty: str
    """Source, without the last newline."""
    edits: tuple[tuple[int, str, str], ...]
    """(line from 1, old, new)"""


def repairs(functions: Iterable[CodeFunction], *, per_function: int, seed: int) -> Iterator[Repair]:
    """Up to `per_function` different single faults of each function, in an order drawn from `seed`."""
    rng = random.Random(seed)
    for function in functions:
        try:
            found = sites(function.source, verify=False)
        except TaskError:
            continue
        for mutation in rng.sample(found, min(per_function, len(found))):
            faulty = apply(function.source, mutation).rstrip("\n")
            try:
                edits = edits_between(faulty, function.source.rstrip("\n"))
            except ValueError:
                continue
            if edits:
                yield Repair(path=function.path, name=function.name, faulty=faulty, edits=tuple(edits))
