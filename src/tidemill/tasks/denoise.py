"""Self-supervision for mending: plant a fault in a real function, and the way back is the lesson.

No test is run and no task is made; any function of any file serves, by the thousand.
"""

import random
from collections.abc import Iterator, Sequence
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


RARE = {"removed_line": 0.3, "swapped_branches": 0.5, "swapped_arguments": 0.7}
"""How much rarer than others an operator is drawn whose repair is long, and hard to tell from what surrounds it."""


def repairs(functions: Sequence[CodeFunction], *, seed: int, max_faults: int = 1, passes: int = 1) -> Iterator[Repair]:
    """A faulty version of each function, `passes` times with other faults, each with 1 to `max_faults` of them on
    different lines: several give more to learn per token that is read.

    Operators are drawn by the root of their number of places, so that frequent ones (wrong names) leave room.
    """
    rng = random.Random(seed)
    for _ in range(passes):
        for function in functions:
            try:
                found = sites(function.source, verify=False)
            except TaskError:
                continue
            chosen = _faults(found, rng.randint(1, max_faults), rng)
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


def _faults(found: Sequence[Mutation], num: int, rng: random.Random) -> list[Mutation]:
    """Up to `num` mutations on different lines; one alone where it changes the number of lines."""
    places: dict[str, list[Mutation]] = {}
    for mutation in found:
        places.setdefault(mutation.operator, []).append(mutation)
    if not places:
        return []
    operators = sorted(places)
    weights = [RARE.get(operator, 1.0) * len(places[operator]) ** 0.5 for operator in operators]
    chosen: list[Mutation] = []
    for operator in rng.choices(operators, weights, k=3 * num):
        mutation = rng.choice(places[operator])
        changes_lines = "\n" in mutation.old + mutation.new
        if not chosen and changes_lines:
            return [mutation]
        if not changes_lines and mutation.line not in {other.line for other in chosen}:
            chosen.append(mutation)
        if len(chosen) == num:
            break
    return chosen
