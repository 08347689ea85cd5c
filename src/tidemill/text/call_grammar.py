"""Calls that name and point at what is there, as an automaton: tools, lines that are shown, texts that stand on them.

`core.grammar.Grammar` says what an automaton is. Whoever follows this one names a tool that there is, and points at
what is there: a line by its number, and any span of its tokens. What goes in place of the span is free, and so are the
arguments of other tools: they may still be wrong.
"""

from collections.abc import Iterable, Mapping, Sequence

from tidemill.core.grammar import Grammar


class Automaton:
    """States are made as needed; edges may only be added."""

    def __init__(self) -> None:
        self._edges: list[dict[int, int]] = []
        self._otherwise: list[int] = []

    def state(self, *, is_free: bool = False) -> int:
        """A new state; a free one stays in itself at every id without an edge."""
        self._edges.append({})
        self._otherwise.append(len(self._otherwise) if is_free else -1)
        return len(self._edges) - 1

    def edge(self, state: int, token_id: int, target: int) -> None:
        """An edge that is there already leads elsewhere from now on."""
        self._edges[state][token_id] = target

    def word(self, state: int, token_ids: Sequence[int]) -> int:
        """The state behind these ids, which may share a beginning with other words from the same state."""
        for token_id in token_ids:
            known = self._edges[state].get(token_id)
            if known is None:
                known = self.state()
                self.edge(state, token_id, known)
            state = known
        return state

    def spans(self, state: int, token_ids: Sequence[int], behind: int, target: int) -> None:
        """From `state`, any run of neighbouring ids of this sequence, at least one, and then id `behind` to `target`.

        The subset construction over positions: at most two states per id.
        """
        made: dict[frozenset[int], int] = {}
        todo = [(state, frozenset(range(len(token_ids))))]
        while todo:
            here, positions = todo.pop()
            by_id: dict[int, set[int]] = {}
            for position in positions:
                if position < len(token_ids):
                    by_id.setdefault(token_ids[position], set()).add(position + 1)
            for token_id, ends in by_id.items():
                key = frozenset(ends)
                if key not in made:
                    made[key] = self.state()
                    self.edge(made[key], behind, target)
                    todo.append((made[key], key))
                self.edge(here, token_id, made[key])

    def grammar(self, start: int) -> Grammar:
        return Grammar.of(self._edges, self._otherwise, start)


def call_grammar(
    tools: Iterable[tuple[Sequence[int], bool, bool]],
    pointing: Sequence[int],
    lines: Mapping[int, tuple[Sequence[int], Sequence[int]]],
    *,
    arg_id: int,
    end_id: int,
) -> Grammar:
    """`tools`: name, whether it takes arguments, whether it needs some. `pointing`: the name of the tool that points at
    `lines`, each of which is given by the ids of its number and of its text; no line: that tool takes what it likes."""
    automaton = Automaton()
    start, done, free = automaton.state(), automaton.state(), automaton.state(is_free=True)
    for name, takes_arguments, needs_arguments in tools:
        said = automaton.word(start, name)
        if list(name) == list(pointing) and lines:
            at_line = automaton.state()
            automaton.edge(said, arg_id, at_line)
            for number, text in lines.values():
                behind = automaton.word(at_line, number)
                at_text = automaton.state()
                automaton.edge(behind, arg_id, at_text)
                automaton.spans(at_text, text, arg_id, free)
            continue
        if takes_arguments:
            automaton.edge(said, arg_id, free)
        if not needs_arguments:
            automaton.edge(said, end_id, done)
    return automaton.grammar(start)
