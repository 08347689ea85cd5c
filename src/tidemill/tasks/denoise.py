"""Self-supervision for mending: plant a fault in a real function, and the way back is the lesson.

No test is run and no task is made; any function of any file serves, by the thousand.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tidemill.core.errors import TaskError
from tidemill.tasks.corpora import CodeFunction
from tidemill.tasks.operators import Mutation, apply, sites
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


def repairs(
    functions: Iterable[CodeFunction], *, per_function: int, seed: int, max_faults: int = 1
) -> Iterator[Repair]:
    """Up to `per_function` faulty versions of each function, drawn from `seed`, each with 1 to `max_faults` faults on
    different lines: several give more to learn per token that is read."""
    rng = random.Random(seed)
    for function in functions:
        try:
            found = sites(function.source, verify=False)
        except TaskError:
            continue
        for first in rng.sample(found, min(per_function, len(found))):
            chosen = _on_other_lines(first, found, rng.randint(1, max_faults), rng)
            faulty = function.source
            for mutation in sorted(chosen, key=lambda mutation: -mutation.start):
                faulty = apply(faulty, mutation)
            faulty = faulty.rstrip("\n")
            try:
                edits = edits_between(faulty, function.source.rstrip("\n"))
            except ValueError:
                continue
            if len(chosen) > 1:
                rng.shuffle(edits)
            if edits:
                yield Repair(path=function.path, name=function.name, faulty=faulty, edits=tuple(edits))


def _on_other_lines(first: Mutation, found: Sequence[Mutation], num: int, rng: random.Random) -> list[Mutation]:
    """`first` and up to `num` − 1 more that leave the number of lines as it is."""
    chosen = [first]
    if "\n" in first.old + first.new:
        return chosen
    for mutation in rng.sample(found, len(found)):
        if len(chosen) == num:
            break
        if mutation.line not in {other.line for other in chosen} and "\n" not in mutation.old + mutation.new:
            chosen.append(mutation)
    return chosen
