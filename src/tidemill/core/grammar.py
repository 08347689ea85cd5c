"""What a continuation may say, as a finite automaton over token ids: sent with a request, walked by the engine.

Constrained decoding after Willard and Louf (arXiv 2307.09702). The engine records what could be sampled at each step,
and the learner renormalises over the same ids: a constraint that is not replayed biases every ratio.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from tidemill.core.records import Record


class Grammar(Record, frozen=True):
    """Deterministic. A continuation ends at a stop id, wherever that leads. Make one with `Grammar.of`."""

    ids: list[list[int]]
    """State → ids that have an edge, in rising order."""
    targets: list[list[int]]
    """State → where they lead."""
    otherwise: list[int]
    """State → where every id without an edge leads; −1: nowhere, so that only ids with an edge may come."""
    start: int = 0

    @classmethod
    def of(cls, edges: Sequence[Mapping[int, int]], otherwise: Sequence[int], start: int = 0) -> "Grammar":
        """`edges`: state → id → next state."""
        ids = [sorted(mapping) for mapping in edges]
        targets = [[mapping[id_] for id_ in row] for mapping, row in zip(edges, ids, strict=True)]
        return cls(ids=ids, targets=targets, otherwise=list(otherwise), start=start)

    def next(self, state: int, token_id: int) -> int:
        """Raises `ValueError` where the id may not come."""
        ids = self.ids[state]
        place = bisect_left(ids, token_id)
        has_edge = place < len(ids) and ids[place] == token_id
        target = self.targets[state][place] if has_edge else self.otherwise[state]
        if target < 0:
            raise ValueError(f"token {token_id} may not come in state {state} of the grammar")
        return target

    def after(self, token_ids: Iterable[int]) -> "Grammar":
        """What is left once these ids were said. Raises `ValueError` as `next`."""
        state = self.start
        for token_id in token_ids:
            state = self.next(state, token_id)
        return Grammar(ids=self.ids, targets=self.targets, otherwise=self.otherwise, start=state)

    def allowed(self, state: int) -> list[int] | None:
        """Ids that may come, in rising order; None for any."""
        return self.ids[state] if self.otherwise[state] < 0 else None

    def fault(self, stop_ids: Iterable[int], vocab_size: int) -> str:
        """Why an engine with this vocabulary cannot follow it; empty where it can."""
        num, stops = len(self.ids), set(stop_ids)
        if not (len(self.targets) == len(self.otherwise) == num and 0 <= self.start < num):
            return f"{num} states, {len(self.targets)} rows of targets, {len(self.otherwise)} defaults, {self.start=}"
        for state, (ids, targets, default) in enumerate(zip(self.ids, self.targets, self.otherwise, strict=True)):
            if len(ids) != len(targets) or sorted(set(ids)) != ids:
                return f"state {state} has {len(ids)} ids, {len(targets)} targets: one each, in rising order"
            if not -1 <= default < num or (targets and not 0 <= min(targets) <= max(targets) < num):
                return f"state {state} leads to a state that is none of the {num}"
            if ids and not 0 <= ids[0] <= ids[-1] < vocab_size:
                return f"state {state} names ids {ids[0]} to {ids[-1]}; the vocabulary is 0 to {vocab_size - 1}"
            leads = [target for id_, target in zip(ids, targets, strict=True) if id_ not in stops]
            leads += [default] if default >= 0 else []
            stuck = next((target for target in leads if not self._goes_on(target)), None)
            if stuck is not None:
                return f"state {state} leads to state {stuck}, where nothing may come, by an id that is no stop"
        return "" if self._goes_on(self.start) else f"nothing may come in its first state, {self.start}"

    def _goes_on(self, state: int) -> bool:
        return bool(self.ids[state]) or self.otherwise[state] >= 0
