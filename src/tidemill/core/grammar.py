"""What a continuation may say, as a finite automaton over token ids: sent with a request, walked by the engine.

Constrained decoding after Willard and Louf (arXiv 2307.09702). The engine records what could be sampled at each step,
and the learner renormalises over the same ids: a constraint that is not replayed biases every ratio.
"""

from collections.abc import Iterable

from tidemill.core.records import Record


class Grammar(Record, frozen=True):
    """Deterministic. A continuation ends at a stop id, wherever that leads."""

    edges: list[dict[int, int]]
    """State → id → next state."""
    otherwise: list[int]
    """State → where every id without an edge leads; −1: nowhere, so that only ids with an edge may come."""
    start: int = 0

    def next(self, state: int, token_id: int) -> int:
        """Raises `ValueError` where the id may not come."""
        target = self.edges[state].get(token_id, self.otherwise[state])
        if target < 0:
            raise ValueError(f"token {token_id} may not come in state {state} of the grammar")
        return target

    def after(self, token_ids: Iterable[int]) -> "Grammar":
        """What is left once these ids were said."""
        state = self.start
        for token_id in token_ids:
            state = self.next(state, token_id)
        return Grammar(edges=self.edges, otherwise=self.otherwise, start=state)

    def allowed(self, state: int) -> list[int] | None:
        """Ids that may come, in rising order; None for any."""
        return sorted(self.edges[state]) if self.otherwise[state] < 0 else None

    def fault(self, stop_ids: Iterable[int], vocab_size: int) -> str:
        """Why an engine with this vocabulary cannot follow it; empty where it can."""
        num, stops = len(self.edges), set(stop_ids)
        if len(self.otherwise) != num or not 0 <= self.start < num:
            return f"{num} states, {len(self.otherwise)} defaults, start {self.start}"
        for state, (edges, default) in enumerate(zip(self.edges, self.otherwise, strict=True)):
            if not -1 <= default < num or (edges and not 0 <= min(edges.values()) <= max(edges.values()) < num):
                return f"state {state} leads to a state that is none of the {num}"
            if edges and not 0 <= min(edges) <= max(edges) < vocab_size:
                return f"state {state} names ids {min(edges)} to {max(edges)}; the vocabulary is 0 to {vocab_size - 1}"
            targets = [target for token_id, target in edges.items() if token_id not in stops]
            targets += [default] if default >= 0 else []
            stuck = next((t for t in targets if not self.edges[t] and self.otherwise[t] < 0), None)
            if stuck is not None:
                return f"state {state} leads to state {stuck}, where nothing may come, by an id that is no stop"
        if not self.edges[self.start] and self.otherwise[self.start] < 0:
            return f"nothing may come in its first state, {self.start}"
        return ""
