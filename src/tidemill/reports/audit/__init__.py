"""The outside audit of a run: it recomputes what the run claims from journal, blobs, store, events and CPU samples.

It shares no code with the services, and imports nothing of theirs: readers, schemas, hashes and even the forward
pass are written here a second time. A fault in the services is not repeated in what checks them.
"""

from pathlib import Path

from tidemill.reports.audit import accounting, chain, resources, tokens
from tidemill.reports.audit.accounting import Book
from tidemill.reports.audit.episodes import EpisodeFacts, facts_of
from tidemill.reports.audit.parity import check_parity
from tidemill.reports.audit.readers import AttemptRow, NoRun, Run, read_run
from tidemill.reports.audit.report import AuditReport, Line, line_of

__all__ = ["AuditReport", "Line", "NoRun", "audit"]

PARITY_TOLERANCE = 1e-5


def audit(folder: Path, *, num_parity: int = 48, seed: int = 0) -> AuditReport:
    """Audit a run folder, which may be in use. `num_parity`: generations that a forward pass is made over.

    Raises `NoRun` (a `ValueError`, one line) where the folder holds no run or its journal is damaged.
    """
    run = read_run(folder)
    facts, problems, candidates = _read_episodes(run)
    batches, digests, batch_problems = accounting.read_batches(run)
    book = Book(
        run=run,
        facts=facts,
        episode_problems=problems,
        batches=batches,
        digests=digests,
        batch_problems=batch_problems,
    )
    bound = run.journal.config.get("max_age")
    lines = (
        accounting.check_closing(book),
        accounting.check_episodes(book),
        accounting.check_rejections(book),
        accounting.check_once(book),
        accounting.check_groups(book),
        accounting.check_ages(book, bound if isinstance(bound, int) else None),
        chain.check_chain(run),
        chain.check_payloads(run),
        tokens.check_sampled(book),
        tokens.check_in_time(book),
        check_parity(run, candidates, num_generations=num_parity, seed=seed, tolerance=PARITY_TOLERANCE),
        resources.check_cpu(run),
        resources.check_blocked(run),
        resources.check_flops(book),
        _check_logs(run),
        resources.check_leftovers(run),
    )
    return AuditReport(folder=str(folder), note=_note(run), lines=lines)


def _read_episodes(run: Run) -> tuple[dict[str, EpisodeFacts], list[str], dict[str, int]]:
    """Facts by attempt, what is wrong with episodes, and how many generations of each a forward pass can check."""
    facts: dict[str, EpisodeFacts] = {}
    problems: list[str] = []
    candidates: dict[str, int] = {}
    wanted: list[tuple[str, str, AttemptRow | None]] = [
        (row.id, row.episode, row) for row in run.attempts.values() if row.episode is not None
    ]
    known = {episode for _, episode, _ in wanted}
    wanted += [
        (f"evaluation {row['episode'][:12]}", row["episode"], None)
        for row in run.evaluations
        if isinstance(row.get("episode"), str) and row["episode"] not in known
    ]
    for name, blob, row in wanted:
        try:
            found, _ = facts_of(run.blobs.record(blob)[0])
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{name}: {_told(error)}")
            continue
        facts[name] = found
        if row is not None:
            problems += accounting.matches_journal(row, run.groups[row.group_id].stage, found)
        if found.stage != "sft" and found.num_single:
            candidates[blob] = found.num_single
    return facts, problems, candidates


def _told(error: Exception) -> str:
    return (
        str(error) if isinstance(error, ValueError) else f"its episode cannot be read: {type(error).__name__} {error}"
    )


def _check_logs(run: Run) -> Line:
    counts = {"events": len(run.events), "metrics": len(run.metrics), "samples": len(run.proc)}
    figure = ", ".join(f"{count} {what}" for what, count in counts.items())
    return line_of("logs readable", run.line_problems, figure, figures={k: float(v) for k, v in counts.items()})


def _note(run: Run) -> str:
    halted = run.journal.meta.get("halted", "")
    if run.running:
        return f"running, at version {run.head}: what is there so far"
    if halted:
        return f"halted at version {run.head}: {halted}"
    total = run.journal.config.get("num_updates")
    return f"ended at version {run.head}" + (f" of {total}" if isinstance(total, int) else "")
