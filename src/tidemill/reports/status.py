"""How a run stands, for `tidemill status`: read from its files alone, whether it runs or not."""

import fcntl
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tidemill.core.events import Event
from tidemill.reports import evaluation as stats
from tidemill.reports.rundata import RunData

SHOWN_METRICS = ("reward_mean", "loss", "entropy", "k3", "grad_norm", "age_max", "tokens_per_s")


def status(folder: Path, *, now_s: float | None = None) -> dict[str, Any]:
    """The facts, for scripts. Raises `RunFolderError` where `folder` is no run."""
    data = RunData(folder)
    journal = data.journal
    states = Counter(row.state for row in journal.attempts if data.groups[row.group_id].stage == "rl")
    trained = {group.id for group in journal.groups if group.batch is not None and group.batch < data.head}
    rejected = {group.id for group in journal.groups if group.state == "rejected"}
    finished = [row.group_id for row in data.finished]
    clock_s = time.time() if now_s is None else now_s
    phases = [event for event in data.events if tells_phase(event)]
    demonstrations = [row for row in journal.attempts if data.groups[row.group_id].stage == "sft"]
    return {
        "run_id": journal.run_id,
        "running": is_running(folder),
        "finished": data.head == journal.config.get("num_updates") and is_done(phases[-1] if phases else None),
        "halted": journal.halted,
        "stage": "rl" if data.head >= 0 else str(data.metrics[-1].get("stage", "")) if data.metrics else "start",
        "version": data.head,
        "num_updates": journal.config.get("num_updates"),
        "demonstrations": [sum(row.outcome is not None for row in demonstrations), len(demonstrations)],
        "attempts": {
            "accepted": len(finished),
            "trained": sum(group_id in trained for group_id in finished),
            "queued": sum(group_id not in trained and group_id not in rejected for group_id in finished),
            "rejected": sum(group_id in rejected for group_id in finished),
            "leased": states["leased"],
        },
        "last_update": dict(data.metrics[-1]) if data.metrics else {},
        "evaluations": _evaluations(data),
        "last_events": {
            event.who: {"what": event.what, "note": event.note, "ago_s": max(0.0, clock_s - event.to_s)}
            for event in data.events
        },
    }


def _evaluations(data: RunData) -> dict[int, dict[str, float]]:
    parts = stats.by_key(data.evaluations, lambda row: row.version)
    return {
        version: {"pass_1": s.pass_1, "low": s.low, "high": s.high, "tasks": float(s.num_tasks)}
        for version, s in sorted(parts.items())
    }


def status_lines(folder: Path, *, now_s: float | None = None) -> list[str]:
    """The same for people, a line each."""
    facts = status(folder, now_s=now_s)
    attempts, halted = facts["attempts"], facts["halted"]
    ended = "finished" if facts["finished"] else "stopped"
    state = "halted" if halted else "running" if facts["running"] else ended
    lines = [f"{facts['run_id']}: {state}, version {max(facts['version'], 0)} of {facts['num_updates']}"]
    if halted:
        lines.append(f"cause        {halted}")
    if facts["version"] < 0:
        done, total = facts["demonstrations"]
        lines.append(f"stage        {facts['stage']}: {done} of {total} demonstrations; version 0 is not there yet")
    lines.append(
        f"attempts     {attempts['accepted']} accepted = {attempts['trained']} trained + {attempts['queued']} queued "
        f"+ {attempts['rejected']} rejected; {attempts['leased']} under way"
    )
    last = facts["last_update"]
    if last:
        figures = ", ".join(f"{name} {last[name]:.4g}" for name in SHOWN_METRICS if name in last)
        lines.append(f"last update  step {last['step']} ({last.get('stage', '?')}): {figures or 'no figures'}")
    for version, one in facts["evaluations"].items():
        interval = f"{one['low']:.1%} to {one['high']:.1%}"
        lines.append(
            f"evaluation   version {version}: pass@1 {one['pass_1']:.1%} ({interval}), {one['tasks']:.0f} tasks"
        )
    for who, event in sorted(facts["last_events"].items()):
        note = f" ({event['note']})" if event["note"] else ""
        lines.append(f"{who:<13}{event['what']}{note}, {_ago(event['ago_s'])} ago")
    return lines


def tells_phase(event: Event) -> bool:
    """Whether it is the supervisor's word on where a run stands: `start` of a service, or `stopping` of them all, whose
    note is how the run ends. The newest one holds."""
    return event.who.startswith("supervisor") and event.what in ("start", "stopping")


def is_done(phase: Event | None) -> bool:
    """Whether everyone whose work ends had ended it: the last version alone does not say so, it is examined yet."""
    return phase is not None and (phase.what, phase.note) == ("stopping", "done")


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def is_running(folder: Path) -> bool:
    """Whether a living run holds the folder's lock."""
    path = folder / "lock"
    if not path.exists():
        return False
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
