"""What was sampled: ids, logprobs, versions, and that no token is of a policy that did not exist yet."""

from tidemill.reports.audit.accounting import Book
from tidemill.reports.audit.report import Line, line_of, unseen

CLOCK_S = 1.0
"""Allowed between the clock of an event and the time stamp of a manifest's file."""


def check_sampled(book: Book) -> Line:
    """Positions contiguous, arrays of one length, logprobs finite and at most 0, versions never going back."""
    name = "sampled tokens"
    policy = {a: facts for a, facts in book.facts.items() if facts.stage != "sft"}
    if not policy:
        return unseen(name, "no episode of a policy could be read")
    problems = [f"attempt {a}, {problem}" for a, facts in sorted(book.facts.items()) for problem in facts.problems]
    for attempt, facts in sorted(policy.items()):
        unknown = sorted(v for v in facts.version_counts if v not in book.run.manifests)
        if unknown:
            problems.append(f"attempt {attempt} was sampled from versions {unknown}, which were never published")
    num_generations = sum(facts.num_generations for facts in policy.values())
    num_spanning = sum(facts.num_spanning for facts in policy.values())
    num_tokens = sum(facts.sampled_tokens for facts in policy.values())
    figure = f"{num_tokens} tokens of {num_generations} generations; {num_spanning} span two versions or more"
    num_unknown = sum(facts.unknown_rows for facts in policy.values())
    if num_unknown > 0.1 * sum(facts.total_tokens for facts in policy.values()):
        problems.append(f"{num_unknown} positions before a sampled token have no recorded state: too many for outages")
    figures = {"tokens": num_tokens, "generations": num_generations, "spanning": num_spanning, "unknown": num_unknown}
    detail = f"{num_unknown} positions before a sampled token whose state was lost with an engine"
    return line_of(name, problems, figure, detail, {key: float(value) for key, value in figures.items()})


def check_in_time(book: Book) -> Line:
    """No episode has tokens of a version that was published after it ended."""
    name = "versions in time"
    ended = {
        event["ids"]["attempt"]: event["to_s"]
        for event in book.run.events
        if event["what"] == "episode" and "attempt" in event.get("ids", {})
    }
    ended |= {row.id: row.done_at_s for row in book.run.attempts.values() if row.done_at_s is not None}
    problems = []
    num_seen = 0
    for attempt, facts in sorted(book.facts.items()):
        if facts.stage == "sft" or attempt not in ended or facts.newest_version not in book.run.published_s:
            continue
        num_seen += 1
        published = book.run.published_s[facts.newest_version]
        if published > ended[attempt] + CLOCK_S:
            problems.append(
                f"attempt {attempt} ended {published - ended[attempt]:.0f} s before version {facts.newest_version}, "
                "of which it has tokens"
            )
    for index, row in sorted(book.run.batches.items()):
        published_s = book.run.published_s.get(index)
        if published_s is None or row.assigned_at_s + CLOCK_S < published_s:
            problems.append(f"batch {index} was assigned before version {index} was published")
    if not num_seen:
        return unseen(name, "no episode of a policy could be placed in time")
    return line_of(name, problems, f"{num_seen} episodes, {len(book.run.batches)} batches", figures={"seen": num_seen})
