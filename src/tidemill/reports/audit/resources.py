"""What the two buildings did with the machine: CPU, waiting, floating-point operations, processes left behind.

Rollouts are coordinator, workers and engines; the learner is the other building; evaluator and supervisor stand apart.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tidemill.reports.audit.accounting import Book
from tidemill.reports.audit.flops import TRAINING_FACTOR, forward_flops_per_token
from tidemill.reports.audit.readers import Run
from tidemill.reports.audit.report import Line, line_of, unseen

BUILDINGS = {
    "coordinator": "rollouts",
    "worker": "rollouts",
    "engine": "rollouts",
    "learner": "learner",
    "evaluator": "evaluator",
}
IDLE_CORES = 0.05
"""A building that used less than this share of a core between two samples did nothing."""
SAMPLE_S = 1.5
MAX_GAP_S = 10.0
"""Samples are taken every second; longer apart, the time between them is unseen."""

Span = tuple[float, float]


def building(who: str) -> str:
    return BUILDINGS.get(who.rsplit("-", 1)[0], "supervisor")


def rl_window(run: Run) -> Span | None:
    """From the publication of version 0 to that of the newest version."""
    if run.head < 1:
        return None
    return run.published_s[0], run.published_s[run.head]


def cpu_steps(run: Run, window: Span) -> dict[str, list[tuple[float, float, float]]]:
    """Service → (from, to, CPU seconds) between neighbouring samples inside the window.

    A service that was started again counts from zero; where a counter goes down (a child was lost with what it had
    used), the step counts nothing.
    """
    steps: dict[str, list[tuple[float, float, float]]] = {}
    last: dict[str, tuple[float, float, int]] = {}
    for sample in run.proc:
        who, at_s, pid = sample["who"], sample["at_s"], sample["pid"]
        used_s = sample["ticks"] / sample["ticks_per_s"]
        if who in last:
            before_s, before_used_s, before_pid = last[who]
            if before_s >= window[0] and at_s <= window[1] and at_s > before_s:
                used = max(0.0, used_s - before_used_s) if pid == before_pid else used_s
                steps.setdefault(who, []).append((before_s, at_s, used))
        last[who] = (at_s, used_s, pid)
    return steps


def check_cpu(run: Run) -> Line:
    """CPU of each building over the RL stage, from samples of `/proc`."""
    name = "cpu of the buildings"
    window = rl_window(run)
    if window is None:
        return unseen(name, "no RL update was published")
    steps = cpu_steps(run, window)
    if not steps:
        return unseen(name, "no samples of /proc lie in the RL stage")
    length = window[1] - window[0]
    used: dict[str, float] = {}
    for who, pieces in steps.items():
        used[building(who)] = used.get(building(who), 0.0) + sum(piece[2] for piece in pieces)
    seen = _covered([(a, b) for pieces in steps.values() for a, b, _ in pieces if b - a <= MAX_GAP_S])
    problems = []
    if seen < 0.9 * (length - 2 * SAMPLE_S):  # up to one sample's distance is not seen at either end
        problems.append(f"samples cover {seen:.0f} s of {length:.0f} s")
    for needed in ("rollouts", "learner"):
        if needed not in used:
            problems.append(f"there are no samples of the {needed}")
    busy = sum(used.values()) / max(seen, 1e-9)
    if busy > 1.1 * (os.cpu_count() or 1) and not problems:
        problems.append(
            f"{busy:.1f} cores busy, and this machine has {os.cpu_count()}: audit on the machine that ran it"
        )
    parts = ", ".join(f"{who} {used[who] / max(seen, 1e-9):.2f}" for who in sorted(used, key=lambda w: -used[w]))
    figure = f"{busy:.2f} cores busy over {length:.0f} s of RL: {parts}"
    figures = {"busy_cores": busy, "window_s": length} | {f"{who}_cpu_s": value for who, value in used.items()}
    return line_of(name, problems, figure, "from samples of utime + stime of every process", figures)


def check_blocked(run: Run) -> Line:
    """Share of the RL stage in which each building waited for the other: by its own word, and by its CPU."""
    name = "blocked buildings"
    window = rl_window(run)
    if window is None:
        return unseen(name, "no RL update was published")
    length = window[1] - window[0]
    waits = [event for event in run.events if event["what"] == "wait"]
    learner = [_clip(event, window) for event in waits if building(event["who"]) == "learner"]
    workers = sorted({event["who"] for event in run.events if event["who"].startswith("worker-")})
    slots = sum(
        (span[1] - span[0]) * _free_share(event)
        for event in waits
        if event["who"] in workers and (span := _clip(event, window))[1] > span[0]
    )
    if not waits:
        return unseen(name, "no service wrote down that it waited")
    steps = cpu_steps(run, window)
    said = {"learner": _covered(learner) / length, "rollouts": slots / (length * max(len(workers), 1))}
    idle = {which: _idle_share(steps, which) for which in said}
    problems = []
    spent = _cpu_inside(steps, learner)
    if spent > 0.5 * max(_covered(learner), 1.0):
        problems.append(f"the learner used {spent:.0f} CPU seconds while it said that it waited")
    figure = "; ".join(
        f"{which} {said[which]:.1%} by events, {_percent(idle[which])} by CPU" for which in ("rollouts", "learner")
    )
    figures = {f"{which}_waiting": share for which, share in said.items()}
    figures |= {f"{which}_idle": share for which, share in idle.items() if share is not None}
    detail = "events: free slots × time in lease calls, and the learner's waits for a batch; CPU: below 5 % of a core"
    return line_of(name, problems, figure, detail, figures)


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _free_share(event: dict[str, Any]) -> float:
    numbers = event.get("numbers") or {}
    return float(numbers.get("free", 1.0)) / max(float(numbers.get("slots", 1.0)), 1.0)


def _clip(event: dict[str, Any], window: Span) -> Span:
    start = max(event["from_s"], window[0])
    return start, max(start, min(event["to_s"], window[1]))


def _covered(spans: Iterable[Span]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _idle_share(steps: dict[str, list[tuple[float, float, float]]], which: str) -> float | None:
    """Share of the sampled time in which all services of a building together did nothing."""
    rates: dict[int, float] = {}
    for who, pieces in steps.items():
        if building(who) == which:
            for start, end, used in pieces:
                second = int((start + end) / 2)
                rates[second] = rates.get(second, 0.0) + used / (end - start)
    return sum(rate < IDLE_CORES for rate in rates.values()) / len(rates) if rates else None


def _cpu_inside(steps: dict[str, list[tuple[float, float, float]]], spans: list[Span]) -> float:
    """CPU seconds of the learner in samples that lie wholly inside one of the spans."""
    pieces = [piece for who, found in steps.items() if building(who) == "learner" for piece in found]
    return sum(used for start, end, used in pieces if any(a <= start and end <= b for a, b in spans))


def check_flops(book: Book) -> Line:
    """Floating-point operations of training beside those of inference, counted from episodes and batches."""
    name = "flop ledger"
    run = book.run
    if not run.manifests:
        return unseen(name, "no version was published")
    try:
        first = run.manifests[min(run.manifests)]
        config = json.loads(run.store_blobs.get(first["files"]["config.json"]))
        inference = sum(_fed_flops(config, book, stage) for stage in ("rl", "eval"))
        # An advantage of 0 moves nothing: such an episode costs the learner a look, and no backward pass.
        training = sum(
            (TRAINING_FACTOR if item["advantage"] else 1.0)
            * facts.total_tokens
            * forward_flops_per_token(config, facts.mean_context)
            for batch in book.trained().values()
            for item in batch["items"]
            if (facts := book.facts.get(item["attempt_id"])) is not None
        )
        context = float(sum(f.mean_context for f in book.facts.values())) / max(len(book.facts), 1)
        before = {
            stage: TRAINING_FACTOR * tokens * forward_flops_per_token(config, context)
            for stage, tokens in sorted(_trained_tokens(run).items())
        }
    except (ValueError, KeyError) as error:
        return Line(name=name, ok=False, figure="cannot be counted", detail=f"{type(error).__name__}: {error}")
    ratio = f"{training / inference:.2f}" if inference else "no inference"
    figure = f"RL training {training / 1e12:.2f} TFLOP, inference {inference / 1e12:.2f} TFLOP (ratio {ratio})"
    figure += "".join(f"; {stage} {value / 1e12:.2f} TFLOP" for stage, value in before.items())
    detail = (
        "training 3 × forward over all tokens of an episode with an advantage, 1 × without; "
        "inference once per position that was fed"
    )
    problems = ["training without inference"] if training and not inference else []
    figures = {"training": training, "inference": inference} | before
    return line_of(name, problems, figure, detail, figures)


def _fed_flops(config: dict[str, Any], book: Book, stage: str) -> float:
    return sum(
        facts.fed_positions * forward_flops_per_token(config, facts.mean_context)
        for facts in book.facts.values()
        if facts.stage == stage
    )


def _trained_tokens(run: Run) -> dict[str, float]:
    """Tokens of the stages before RL, by the learner's log."""
    totals: dict[str, float] = {}
    for row in run.metrics:
        stage = str(row.get("stage", ""))
        if stage not in ("", "rl") and isinstance(row.get("num_tokens"), int | float):
            totals[stage] = totals.get(stage, 0.0) + float(row["num_tokens"])
    return totals


def check_leftovers(run: Run) -> Line:
    """No process of an ended run is alive."""
    name = "no process left"
    if run.running:
        return unseen(name, "the run is still going")
    left = sorted(set(leftover_processes(run.folder)) | set(living_services(run.folder)))
    problems = [f"process {pid}: {command[:100]}" for pid, command in left]
    return line_of(name, problems, f"{len(left)} alive", figures={"alive": float(len(left))})


def leftover_processes(folder: Path) -> list[tuple[int, str]]:
    """Processes that carry the run's label in their environment, or whose command line names the run folder, but for
    readers of it such as this audit and its callers."""
    target = folder.resolve()
    label = f"TIDEMILL_RUN={target}#".encode()
    own = _ancestors(os.getpid())
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in own:
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            working = Path(os.readlink(entry / "cwd"))
            labelled = any(item.startswith(label) for item in (entry / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue  # it ended, or it is another user's
        if labelled or (_names(arguments, working, target) and _is_service(arguments)):
            found.append((int(entry.name), " ".join(arguments).strip()))
    return sorted(found)


def living_services(folder: Path) -> list[tuple[int, str]]:
    """Processes that the supervisor wrote down and that live: pid and start time both fit."""
    found = []
    for path in sorted((folder / "services").glob("*.json")):
        try:
            info = json.loads(path.read_bytes())
            stat = Path(f"/proc/{info['pid']}/stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError, KeyError):
            continue
        if int(stat[19]) == info.get("start_ticks") and stat[0] != "Z":
            found.append((int(info["pid"]), str(info.get("who", path.stem))))
    return found


def _is_service(arguments: list[str]) -> bool:
    """A part of a run, not a person's editor or a report on it."""
    joined = " ".join(arguments)
    reading = {"audit", "report", "status", "dash", "stop", "agent"}
    return ("tidemill" in joined or "bwrap" in joined) and not reading & set(arguments[:6])


def _names(arguments: list[str], working: Path, target: Path) -> bool:
    for argument in arguments:
        path = argument.split("=", 1)[-1]
        if "/" not in path or len(path) > 4096:
            continue
        try:
            resolved = (working / path).resolve()
        except (OSError, RuntimeError, ValueError):
            continue
        if resolved == target or target in resolved.parents:
            return True
    return False


def _ancestors(pid: int) -> set[int]:
    found = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return found
