"""A look at a run as a terminal shows it, made for 60 columns and more: pure, so that it can be tested as text."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tidemill.core.events import Event
from tidemill.reports.live.facts import Facts, Stage, State
from tidemill.text.terminal import one_line

MIN_WIDTH, MAX_WIDTH = 30, 110
LABEL_WIDTH = 9
BARS = "▁▂▃▄▅▆▇█"
GAP = " · "
STAGES: dict[Stage, str] = {"start": "starting", "cpt": "pre-training", "sft": "demonstrations", "rl": "update"}
STYLES: dict[State, str] = {
    "preparing": "cyan",
    "running": "bold green",
    "stopping": "bold yellow",
    "stopped": "yellow",
    "halted": "bold red",
    "finished": "bold cyan",
}


def screen(facts: Facts, *, width: int, now_s: float) -> RenderableType:
    """The view of one look. `width`: columns of the terminal; where it is narrower than 30, lines are cut."""
    inner = min(max(width, MIN_WIDTH), MAX_WIDTH) - 2
    parts = [_title(facts, inner), _place(facts, inner)]
    rows = Table.grid(padding=(0, 1))
    rows.add_column(width=LABEL_WIDTH, style="dim", no_wrap=True)
    rows.add_column(width=inner - LABEL_WIDTH - 1, overflow="fold")
    for label, value in _rows(facts, inner - LABEL_WIDTH - 1, now_s):
        rows.add_row(label, value)
    return Padding(Group(*parts, rows), (0, 1), expand=False)


def sparkline(values: Sequence[float], width: int) -> str:
    """One character per value, the newest `width` of them, between the lowest and the highest of these."""
    shown = list(values)[-width:] if width > 0 else []
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high <= low:
        return BARS[0] * len(shown)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in shown)


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 05`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 5940:
        return f"{seconds / 60:.0f} min"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02}"


def _title(facts: Facts, width: int) -> Text:
    right = "" if facts.elapsed_s is None else duration(facts.elapsed_s)
    left = Text.assemble(
        ("tidemill ", "bold"), (facts.state, STYLES[facts.state]), "  ", (one_line(facts.run_id), "dim")
    )
    left.truncate(width - len(right) - 1, overflow="ellipsis", pad=True)
    return left.append(f" {right}")


def _place(facts: Facts, width: int) -> RenderableType:
    left = STAGES[facts.stage]
    if facts.total is None:
        return Text(left if facts.state in ("running", "stopping") else "")
    right = f"{facts.done:,} of {facts.total:,}"
    if facts.eta_s is not None:
        right += f", {duration(facts.eta_s)} left"
    line = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(facts.total, 1), completed=facts.done, width=max(width - len(left) - len(right) - 2, 4))
    line.add_row(left, bar, right)
    return line


def _rows(facts: Facts, width: int, now_s: float) -> list[tuple[str, Text]]:
    """Label and value; what is not known is left out."""
    rows = [
        ("reward", _reward(facts, width)),
        ("loss", _loss(facts)),
        ("age", _age(facts)),
        ("tokens/s", _tokens(facts)),
        ("attempts", _attempts(facts)),
        ("held-out", _held_out(facts)),
        ("cores", Text(GAP.join(f"{kind} {busy:.2f}" for kind, busy in facts.cores.items()))),
        ("last", _event(facts.news, width, now_s)),
        ("fault", _event(facts.fault, width, now_s, style="red")),
        ("halted", Text(one_line(facts.cause), style="bold red")),
    ]
    return [(label, value) for label, value in rows if value.plain]


def _reward(facts: Facts, width: int) -> Text:
    if not facts.rewards:
        return Text("")
    head, tail = f"{facts.rewards[-1]:.3f} ", f" best {max(facts.rewards):.3f}"
    return Text.assemble((head, "bold"), (sparkline(facts.rewards, width - len(head) - len(tail)), "green"), tail)


def _loss(facts: Facts) -> Text:
    """Of the stages before RL."""
    return Text(f"{float(facts.last['nll']):.3f} nats per token" if "nll" in facts.last else "")


def _age(facts: Facts) -> Text:
    if "age_max" not in facts.last:
        return Text("")
    bound = None if facts.counts is None else facts.counts.config.get("max_age")
    middle, most = float(facts.last.get("age_p50", 0)), float(facts.last["age_max"])
    return Text(f"p50 {middle:.0f}{GAP}max {most:.0f}" + ("" if bound is None else f"{GAP}bound {bound} versions"))


def _tokens(facts: Facts) -> Text:
    parts = []
    if facts.rollout_tokens_per_s is not None:
        parts.append(f"rollouts {facts.rollout_tokens_per_s:,.0f}")
    if "tokens_per_s" in facts.last:
        parts.append(f"learner {float(facts.last['tokens_per_s']):,.0f} within its updates")
    return Text(GAP.join(parts))


def _attempts(facts: Facts) -> Text:
    counts = facts.counts
    if counts is None:
        return Text("")
    if facts.stage != "rl":
        done, total = counts.demonstrations
        return Text(f"{done} of {total} demonstrations played" if total else "")
    numbers = {"leased": counts.leased, "queued": counts.queued, "trained": counts.trained, "rejected": counts.rejected}
    return Text(GAP.join(f"{num:,} {name}" for name, num in numbers.items()))


def _held_out(facts: Facts) -> Text:
    """The first examination and the last ones: what a run is judged by."""
    shown = facts.evaluations[:1] + facts.evaluations[1:][-2:]
    parts = [f"version {version} {share:.1%}" for version, share, _ in shown]
    return Text(GAP.join([*parts, f"{shown[-1][2]} attempts"]) if shown else "")


def _event(event: Event | None, width: int, now_s: float, style: str = "") -> Text:
    if event is None:
        return Text("")
    who, what = event.ids.get("service", event.who), event.what
    version = "" if event.version is None else f" version {event.version}"
    ago = f", {duration(max(0.0, now_s - event.to_s))} ago"
    text = Text(f"{one_line(who)} {one_line(what)}{version}", style=style)
    if event.note:
        text.append(f": {one_line(event.note)}")
    text.truncate(max(width - len(ago), 1), overflow="ellipsis")
    return text.append(ago)
