"""The sections of a report page: headline, curves, tables, timeline, costs. Each returns escaped HTML."""

from collections import Counter
from collections.abc import Sequence
from html import escape

from tidemill.core.journal import AttemptRow
from tidemill.reports import evaluation as stats
from tidemill.reports.audit import AuditReport
from tidemill.reports.charts import Lane, Point, Series, bars, line_chart, number, timeline
from tidemill.reports.resampling import paired_difference
from tidemill.reports.rundata import RunData

SERVICES = ("coordinator", "worker", "engine", "learner", "evaluator")
SPAN_CLASSES = {
    "wait": "wait",
    "pretrain": "work",
    "imitate": "work",
    "update": "work",
    "episode": "work",
    "batch": "work",
    "publish": "swap",
    "swap": "swap",
    "checkpoint": "swap",
    "evaluate": "eval",
    "fault": "fault",
    "reject": "fault",
}


def section(title: str, note: str, body: str) -> str:
    return f'<h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{body}'


# --- headline ------------------------------------------------------------------------------------------------


def header(data: RunData, audited: AuditReport) -> str:
    name = data.folder.resolve().name
    tiles = "".join(
        f'<div class="tile {css}"><b>{escape(figure)}</b><span>{escape(label)}</span></div>'
        for figure, label, css in _tiles(data, audited)
    )
    return (
        f'<p class="overline">Tidemill run</p><h1>{escape(name)}</h1>'
        f'<p class="lead">{escape(summary_line(data))}</p><div class="tiles">{tiles}</div>'
    )


def summary_line(data: RunData) -> str:
    """What the run achieved, in a sentence or two of plain text."""
    by_version = _evaluations(data)
    minutes = (data.end_s - data.start_s) / 60
    config = data.journal.config
    text = (
        f"{max(data.head, 0)} of {config.get('num_updates', '?')} RL updates and {len(data.finished)} episodes "
        f"in {minutes:.0f} minutes, {config.get('group_size', '?')} attempts per task, "
        f"{config.get('groups_per_batch', '?')} tasks per batch, at most {config.get('max_age', '?')} versions old."
    )
    if data.journal.halted:
        return f"Halted: {data.journal.halted}. {text}"
    if len(by_version) < 2:
        return text
    first, last = min(by_version), max(by_version)
    before, after = by_version[first], by_version[last]
    rows = data.evaluations
    gap = paired_difference(
        stats.solve_rates(row for row in rows if row.version == first),
        stats.solve_rates(row for row in rows if row.version == last),
    )
    return (
        f"Of held-out tasks, version {first} solved {before.pass_1:.1%} and version {last} {after.pass_1:.1%}: "
        f"{gap.mean * 100:+.1f} points, 95 % interval {gap.low * 100:+.1f} to {gap.high * 100:+.1f}, "
        f"p = {gap.p_value:.2g} over {gap.num_tasks} tasks. {text}"
    )


def _tiles(data: RunData, audited: AuditReport) -> list[tuple[str, str, str]]:
    by_version = _evaluations(data)
    tiles = []
    if by_version:
        first, last = min(by_version), max(by_version)
        label = "held-out pass@1" if first == last else f"held-out pass@1, version {first} → {last}"
        figure = f"{by_version[last].pass_1:.0%}"
        tiles.append((figure if first == last else f"{by_version[first].pass_1:.0%} → {figure}", label, "wide"))
    tiles.append((str(max(data.head, 0)), "RL updates published", ""))
    tiles.append((f"{len(data.finished):,}", "RL episodes finished", ""))
    ages = audited.line("ages").figures
    if "max" in ages:
        tiles.append(
            (f"{ages['max']:g} of {ages.get('bound', float('nan')):g}", "oldest token trained, in versions", "")
        )
    cores = audited.line("cpu of the buildings").figures
    if "busy_cores" in cores:
        tiles.append((f"{cores['busy_cores']:.2f}", "cores busy during RL", ""))
    held = sum(line.ok is True for line in audited.lines)
    failed = sum(line.ok is False for line in audited.lines)
    verdict = f"{held} of {held + failed}"
    tiles.append((verdict, "checks of the outside audit hold", "bad" if failed else "good"))
    return tiles


def _evaluations(data: RunData) -> dict[int, stats.Summary]:
    return dict(sorted(stats.by_key(data.evaluations, lambda row: row.version).items()))


# --- curves --------------------------------------------------------------------------------------------------


def curves(data: RunData) -> str:
    """Small charts, from the journal and the blobs where they hold the figure, else from the learner's log."""
    rewards, solved, ast_equal = _batch_means(data)
    members = _members(data)
    evaluations = _evaluations(data)
    held_out = Series(
        label="held-out pass@1",
        points=tuple((float(version), summary.pass_1) for version, summary in evaluations.items()),
        errors=tuple((summary.low, summary.high) for summary in evaluations.values()),
        dots=True,
        colour="b",
    )
    ages = {
        index: sorted(index - (row.oldest_version or 0) for row in rows if row.oldest_version is not None)
        for index, rows in members.items()
    }
    charts = [
        _card("Reward, mean of a batch", [Series(label="reward", points=rewards, smooth=True)]),
        _card(
            "Solved",
            [
                Series(label="training batches", points=solved, smooth=True),
                Series(label="restored exactly", points=ast_equal, smooth=True, colour="c"),
                held_out,
            ],
            percent=True,
        ),
        _card(
            "Age of episodes, versions",
            [
                Series(label="largest", points=_by_index({k: v[-1] for k, v in ages.items() if v}), colour="b"),
                Series(label="median", points=_by_index({k: v[len(v) // 2] for k, v in ages.items() if v})),
            ],
            from_zero=True,
        ),
        _card(
            "Tokens of an episode, mean",
            [
                Series(label="sampled", points=_mean_of(members, "sampled_tokens"), smooth=True),
                Series(label="in all", points=_mean_of(members, "total_tokens"), smooth=True, colour="b"),
            ],
            from_zero=True,
        ),
        _card("Entropy, nats per token", [Series(label="entropy", points=_logged(data, "entropy"), smooth=True)]),
        _card(
            "k3, learner against sampler",
            [Series(label="k3", points=_logged(data, "k3", "behaviour_k3"), smooth=True)],
            from_zero=True,
        ),
        _card("Gradient norm", [Series(label="norm", points=_logged(data, "grad_norm"), smooth=True)], from_zero=True),
        _card(
            "Seconds of an update",
            [Series(label="seconds", points=_update_seconds(data), smooth=True)],
            from_zero=True,
        ),
    ]
    return f'<div class="cards">{"".join(charts)}</div>'


def _card(title: str, series: Sequence[Series], *, percent: bool = False, from_zero: bool = False) -> str:
    chart = line_chart(series, x_label="update", percent=percent, y_from_zero=from_zero or percent)
    return f'<div class="card"><h3>{escape(title)}</h3>{chart}</div>'


def _by_index(values: dict[int, float]) -> tuple[Point, ...]:
    return tuple((float(index), float(value)) for index, value in sorted(values.items()))


def _members(data: RunData) -> dict[int, list[AttemptRow]]:
    """Batch → its attempts, as the journal has them."""
    rows = {row.id: row for row in data.journal.attempts}
    return {
        index: [rows[item.attempt_id] for item in batch.items if item.attempt_id in rows]
        for index, batch in data.batches.items()
    }


def _mean_of(members: dict[int, list[AttemptRow]], name: str) -> tuple[Point, ...]:
    return _by_index(
        {k: sum(getattr(row, name) or 0 for row in rows) / len(rows) for k, rows in members.items() if rows}
    )


def _batch_means(data: RunData) -> tuple[tuple[Point, ...], tuple[Point, ...], tuple[Point, ...]]:
    rewards: dict[int, float] = {}
    measured: dict[str, dict[int, float]] = {"solved": {}, "ast_equal": {}}
    for index, batch in data.batches.items():
        rewards[index] = sum(item.reward for item in batch.items) / len(batch.items)
        found = [episode.measures for item in batch.items if (episode := data.episode(item.episode)) is not None]
        for name, values in measured.items():
            known = [measures[name] for measures in found if name in measures]
            if known:
                values[index] = sum(known) / len(known)
    return _by_index(rewards), _by_index(measured["solved"]), _by_index(measured["ast_equal"])


def _logged(data: RunData, *names: str) -> tuple[Point, ...]:
    """The first of `names` that the learner logged, over versions."""
    for name in names:
        points = [
            (float(row["version"]), float(row[name]))
            for row in data.metrics
            if row.get("stage") == "rl" and isinstance(row.get(name), int | float) and "version" in row
        ]
        if points:
            return tuple(points)
    return ()


def _update_seconds(data: RunData) -> tuple[Point, ...]:
    return tuple(
        (float(event.version or 0), event.to_s - event.from_s)
        for event in data.events
        if event.what == "update" and event.version is not None and event.who.startswith("learner")
    )


# --- tables --------------------------------------------------------------------------------------------------


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are text; all but the first column are figures."""
    head = "".join(f"<th{'' if i == 0 else ' class=num'}>{escape(cell)}</th>" for i, cell in enumerate(header))
    body = "".join(
        "<tr>"
        + "".join(f"<td{'' if i == 0 else ' class=num'}>{escape(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def evaluation(data: RunData) -> str:
    """Held-out tasks, by version, and by package at the last one."""
    if not data.evaluations:
        return section("Evaluation", "No version was examined.", "")
    last = max(row.version for row in data.evaluations)
    final = [row for row in data.evaluations if row.version == last]
    tables = [_summaries("version", {str(v): s for v, s in _evaluations(data).items()})]
    for key in ("package", "family"):
        parts = stats.by_key(final, lambda row, key=key: getattr(row, key))  # type: ignore[misc]
        if len(parts) > 1:
            named = {str(name): parts[name] for name in sorted(parts)}
            tables.append(f"<h3>By {key}, version {last}</h3>{_summaries(key, named)}")
    note = "Held-out tasks in the same harness; intervals by bootstrap over tasks, at 95 %."
    return section("Evaluation", note, f'<div style="display:grid;gap:14px">{"".join(tables)}</div>')


def _summaries(heading: str, parts: dict[str, stats.Summary]) -> str:
    ks = sorted({k for part in parts.values() for k in part.best_of if k > 1})
    header = [heading, "tasks", "pass@1", "interval", *(f"pass@{k}" for k in ks), "reward", "tokens", "turns"]
    rows = [
        [name or "–", str(s.num_tasks), f"{s.pass_1:.1%}", f"{s.low:.1%} to {s.high:.1%}"]
        + [f"{s.best_of[k]:.1%}" if k in s.best_of else "–" for k in ks]
        + [f"{s.reward:.3f}", f"{s.sampled_tokens:.0f}", f"{s.turns:.1f}"]
        for name, s in parts.items()
    ]
    return _table(header, rows)


def accounting(data: RunData, audited: AuditReport) -> str:
    counts = audited.line("accounting closes").figures
    outcomes = Counter(row.outcome for row in data.finished)
    reasons = Counter(group.reason.split(":")[0] for group in data.journal.groups if group.state == "rejected")
    lost = Counter(row.how for row in data.journal.tries)
    rows = [
        (name, counts[name], number(counts[name]))
        for name in ("accepted", "trained", "queued", "rejected")
        if name in counts
    ]
    cards = [
        ("Attempts of the RL stage", bars(rows)),
        ("How they ended", bars([(str(k), float(n), f"{n}") for k, n in outcomes.most_common()], colour="c")),
        (
            "Rejected groups, and leases that were lost",
            bars(
                [(f"rejected: {k}", float(n), f"{n}") for k, n in reasons.most_common()]
                + [(f"lease: {k}", float(n), f"{n}") for k, n in lost.most_common()],
                colour="b",
            )
            if reasons or lost
            else '<p class="nothing">none</p>',
        ),
    ]
    return '<div class="cards">' + "".join(f'<div class="card"><h3>{t}</h3>{b}</div>' for t, b in cards) + "</div>"


def audit_table(audited: AuditReport) -> str:
    marks = {True: ("mark-ok", "✓"), False: ("mark-fail", "✗"), None: ("mark-none", "–")}
    rows = []
    for line in audited.lines:
        css, mark = marks[line.ok]
        detail = f'<span class="detail">{escape(line.detail)}</span>' if line.detail else ""
        rows.append(
            f'<tr><td class="{css}">{mark}</td><td class="what">{escape(line.name)}</td>'
            f"<td>{escape(line.figure)}{detail}</td></tr>"
        )
    note = f'<p class="note">{escape(audited.note)}</p>'
    return f'<div class="card">{note}<table class="wide"><tbody>{"".join(rows)}</tbody></table></div>'


# --- timeline and costs --------------------------------------------------------------------------------------


def lanes(data: RunData) -> str:
    """A lane per service: strips from its events, area from its CPU."""
    length_s = data.end_s - data.start_s
    if length_s <= 0:
        return '<p class="nothing">no events yet</p>'
    rates = data.cpu_rates()
    drawn = []
    for who in sorted({event.who for event in data.events} | set(rates), key=_lane_order):
        if _lane_order(who)[0] == len(SERVICES):
            continue
        spans = [
            (event.from_s - data.start_s, event.to_s - data.start_s, SPAN_CLASSES[event.what])
            for event in data.events
            if event.who == who and event.what in SPAN_CLASSES
        ]
        level = [(at_s - data.start_s, min(rate, 2.0)) for at_s, rate in rates.get(who, []) if at_s >= data.start_s]
        drawn.append(Lane(label=who, spans=tuple(spans), level=tuple(_thinned(level, 600))))
    marks = [(at_s - data.start_s, float(version)) for version, at_s in data.versions.items() if at_s >= data.start_s]
    keys = "".join(
        f'<span><i class="key {css}"></i>{text}</span>'
        for css, text in (
            ("work", "episodes, updates, batches"),
            ("wait", "waiting"),
            ("swap", "publication, weight swap, checkpoint"),
            ("eval", "examination"),
            ("fault", "fault, rejection"),
            ("levelkey", "CPU, of one core"),
        )
    )
    svg = timeline(drawn, length_s, marks)
    return f'<div class="card"><div class="scroll">{svg}</div><p class="legend">{keys}</p></div>'


def _lane_order(who: str) -> tuple[int, str]:
    name = who.rsplit("-", 1)[0]
    return (SERVICES.index(name) if name in SERVICES else len(SERVICES), who)


def _thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points, each the mean of its neighbours."""
    size = -(-len(points) // most) if points else 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def costs(data: RunData, audited: AuditReport) -> str:
    """CPU seconds of an episode, stage by stage, and floating-point operations of the run."""
    episodes = [episode for row in data.finished[-200:] if (episode := data.episode(row.episode)) is not None]
    stages: Counter[str] = Counter()
    for episode in episodes:
        stages.update({stage: used for stage, used in episode.cpu_s.items()})
    rows = [(stage, used / len(episodes)) for stage, used in stages.most_common()] if episodes else []
    cores = audited.line("cpu of the buildings").figures
    window_s, finished = cores.get("window_s", 0.0), max(len(data.finished), 1)
    for label, key in (("rollout services, all of it", "rollouts_cpu_s"), ("learner", "learner_cpu_s")):
        if key in cores and window_s:
            rows.append((label, cores[key] / finished))
    cpu = bars([(stage, used, f"{used:.3f} s") for stage, used in rows], colour="a")
    ledger = audited.line("flop ledger").figures
    names = {"training": "RL training", "inference": "inference"}
    flops = bars([(names.get(k, k), value, f"{number(value / 1e9)} GFLOP") for k, value in ledger.items()], colour="b")
    title = f"CPU seconds of an episode, mean of the last {len(episodes)}"
    body = (
        f'<div class="cards"><div class="card"><h3>{title}</h3>{cpu}</div>'
        f'<div class="card"><h3>Floating-point operations</h3>{flops}</div></div>'
    )
    note = "Stages are measured inside the episode; services are /proc samples over the RL stage, per finished episode."
    return section("What an episode costs", note, body)
