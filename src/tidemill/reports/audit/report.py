"""What an audit says: one line per check."""

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, kw_only=True)
class Line:
    """One check. `ok` is None where the run holds nothing that it could look at."""

    name: str
    ok: bool | None
    figure: str
    """What was found, in few words, for people."""
    detail: str = ""
    """What is wrong, by id; or how the figure came about."""
    figures: dict[str, float] = field(default_factory=dict)
    """The same as numbers, for scripts."""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The outcome of `audit`: it passes where no line failed."""

    folder: str
    note: str
    """Whether the run has ended, or was audited while it ran."""
    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        return all(line.ok is not False for line in self.lines)

    def line(self, name: str) -> Line:
        return next(line for line in self.lines if line.name == name)

    def table(self, width: int = 120) -> str:
        """For a terminal: a mark, the check and its figure; the detail below where it is needed."""
        marks = {True: "ok  ", False: "FAIL", None: " -  "}
        wide = max((len(line.name) for line in self.lines), default=0)
        rows = [f"audit of {self.folder} ({self.note})", ""]
        for line in self.lines:
            rows.append(f"{marks[line.ok]}  {line.name:<{wide}}  {line.figure}")
            if line.detail and line.ok is not True:
                rows += [f"{'':<{wide + 8}}{piece}" for piece in _fold(line.detail, width - wide - 8)]
        failed = sum(line.ok is False for line in self.lines)
        unseen = sum(line.ok is None for line in self.lines)
        rows += ["", f"{len(self.lines) - failed - unseen} hold, {failed} failed, {unseen} with nothing to look at"]
        return "\n".join(rows)

    def to_json(self) -> str:
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2, sort_keys=True)


def _fold(text: str, width: int) -> list[str]:
    rows = [""]
    for word in text.split():
        if rows[-1] and len(rows[-1]) + 1 + len(word) > width:
            rows.append("")
        rows[-1] = f"{rows[-1]} {word}".strip()
    return rows


def line_of(
    name: str, problems: list[str], figure: str, detail: str = "", figures: dict[str, float] | None = None
) -> Line:
    """A line that fails where there are problems, and names the first few of them."""
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        return Line(name=name, ok=False, figure=figure, detail=shown, figures=figures or {})
    return Line(name=name, ok=True, figure=figure, detail=detail, figures=figures or {})


def unseen(name: str, why: str) -> Line:
    """A line of a check that had nothing to look at."""
    return Line(name=name, ok=None, figure="nothing to look at", detail=why)


def quantiles(values: list[float], *, points: tuple[float, ...] = (0.5, 0.99, 1.0)) -> list[float]:
    """Nearest-rank quantiles; the last point is the maximum."""
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(point * len(ordered)))] for point in points] if ordered else []
