"""Code as the policy sees it: a window of numbered lines; and the edits that lead from one line to another."""

from collections.abc import Sequence

from tidemill.text.tokenizer import common_prefix, pieces

MAX_WINDOW_LINES = 99
"""Numbers in a window have at most two digits, so that each is one token."""


def window(lines: Sequence[str], start: int = 0, num_lines: int = MAX_WINDOW_LINES) -> str:
    """`num_lines` lines from index `start`, each as `N|text`; N counts from 1 at the top of the window."""
    if not 0 < num_lines <= MAX_WINDOW_LINES:
        raise ValueError(f"num_lines {num_lines} is not between 1 and {MAX_WINDOW_LINES}")
    shown = lines[max(0, start) : max(0, start) + num_lines]
    return numbered(shown, 1)


def numbered(lines: Sequence[str], first: int) -> str:
    """The lines as `N|text`, N counting from `first`."""
    return "\n".join(f"{number}|{line}" for number, line in enumerate(lines, first))


def line_edit(before: str, after: str) -> tuple[str, str]:
    """`(old, new)` such that replacing the first occurrence of `old` in `before` by `new` gives `after`.

    As short as whole pieces allow, and never empty in `old`. Raises `ValueError` where the lines are equal or
    `before` is empty.
    """
    if before == after or not before:
        raise ValueError(f"no edit leads from {before!r} to {after!r}")
    old, new = pieces(before), pieces(after)
    head = common_prefix(old, new)
    tail = common_prefix(old[head:][::-1], new[head:][::-1])
    stop_old, stop_new = len(old) - tail, len(new) - tail
    if head == stop_old:  # an insertion: hold on to the piece before it, or to the one after it
        if head > 0:
            head -= 1
        else:
            stop_old, stop_new = stop_old + 1, stop_new + 1
    while before.find("".join(old[head:stop_old])) != len("".join(old[:head])):
        head -= 1
    return "".join(old[head:stop_old]), "".join(new[head:stop_new])


def edits_between(before: str, after: str) -> list[tuple[int, str, str]]:
    """`(line, old, new)` edits, to be made in this order (from the bottom up), that lead from one text to the other.

    Lines count from 1. A line that has to go leaves an empty one behind. Raises `ValueError` where there is no line to
    hold on to.
    """
    old, new = before.split("\n"), after.split("\n")
    head = common_prefix(old, new)
    tail = common_prefix(old[head:][::-1], new[head:][::-1])
    gone, come = old[head : len(old) - tail], new[head : len(new) - tail]
    if not gone and not come:
        return []
    if len(gone) == len(come) and all(line for line, other in zip(gone, come, strict=True) if line != other):
        edits = [
            (head + n, *line_edit(*pair))
            for n, pair in enumerate(zip(gone, come, strict=True), 1)
            if pair[0] != pair[1]
        ]
        return edits[::-1]
    held = [number for number, line in enumerate(gone) if line]
    if held:  # the first line that is not empty becomes all the new ones
        targets = {number: "" for number in held} | {held[0]: "\n".join(come)}
        edits = [(head + n + 1, *line_edit(gone[n], text)) for n, text in targets.items() if gone[n] != text]
        return edits[::-1]
    for at in (head - 1, head + len(gone)):  # an insertion holds on to a line beside it
        if 0 <= at < len(old) and old[at]:
            text = "\n".join([old[at], *come] if at < head else [*come, old[at]])
            return [(at + 1, *line_edit(old[at], text))]
    raise ValueError(f"nothing beside line {head + 1} to hold an insertion")
