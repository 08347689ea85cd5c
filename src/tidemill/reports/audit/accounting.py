"""Accounting: nothing is lost, nothing is twice, every batch is what its version says."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tidemill.reports.audit.episodes import EpisodeFacts
from tidemill.reports.audit.readers import AttemptRow, Run
from tidemill.reports.audit.report import Line, line_of, quantiles, unseen


@dataclass(frozen=True, kw_only=True)
class Book:
    """What the blobs say, beside what the journal says."""

    run: Run
    facts: dict[str, EpisodeFacts]
    """Attempt → facts, of every episode that could be read."""
    episode_problems: list[str]
    """Episodes that are missing, damaged, or not what the journal says of them."""
    batches: dict[int, dict[str, Any]]
    """Index → decoded record, of every batch that could be read."""
    digests: dict[int, str]
    """Index → sha256 of the record as it lies in the blobs."""
    batch_problems: list[str] = field(default_factory=list)

    def attempts(self, stage: str) -> list[AttemptRow]:
        return [row for row in self.run.attempts.values() if self.run.groups[row.group_id].stage == stage]

    def trained(self) -> dict[int, dict[str, Any]]:
        """The batches whose version exists."""
        return {index: batch for index, batch in self.batches.items() if index + 1 in self.run.manifests}


def read_batches(run: Run) -> tuple[dict[int, dict[str, Any]], dict[int, str], list[str]]:
    """Records, digests and problems of all batches in the journal."""
    batches: dict[int, dict[str, Any]] = {}
    digests: dict[int, str] = {}
    problems = []
    for index, row in sorted(run.batches.items()):
        try:
            batches[index], digests[index] = run.blobs.record(row.blob)
        except ValueError as error:
            problems.append(f"batch {index}: {error}")
    return batches, digests, problems


def matches_journal(row: AttemptRow, group_stage: str, facts: EpisodeFacts) -> list[str]:
    """What the journal says of an attempt, counted again from its episode."""
    pairs = [
        ("attempt", row.id, facts.attempt_id),
        ("group", row.group_id, facts.group_id),
        ("stage", group_stage, facts.stage),
        ("outcome", row.outcome, facts.outcome),
        ("sampled tokens", row.sampled_tokens, facts.sampled_tokens),
        ("total tokens", row.total_tokens, facts.total_tokens),
    ]
    if group_stage == "rl":
        pairs += [
            ("oldest version", row.oldest_version, facts.oldest_version),
            ("newest version", row.newest_version, facts.newest_version),
        ]
    problems = [
        f"attempt {row.id}: {what} is {counted} in its episode and {said} in the journal"
        for what, said, counted in pairs
        if said != counted
    ]
    if row.reward is None or not abs(row.reward - facts.reward) <= 1e-12:  # NaN, too
        problems.append(f"attempt {row.id}: reward {facts.reward} in its episode and {row.reward} in the journal")
    return problems


def check_episodes(book: Book) -> Line:
    """Every finished attempt has its episode, whole, and as the journal describes it."""
    finished = [row for row in book.run.attempts.values() if row.state == "done"]
    if not finished:
        return unseen("episodes", "no attempt has finished")
    problems = list(book.episode_problems)
    seen: dict[str, str] = {}
    for row in finished:
        if row.episode is None:
            problems.append(f"attempt {row.id} finished ({row.outcome}) and has no episode")
        elif row.episode in seen:
            problems.append(f"attempts {seen[row.episode]} and {row.id} share one episode")
        else:
            seen[row.episode] = row.id
    by_stage = Counter(facts.stage for facts in book.facts.values())
    told = ", ".join(f"{count} {stage}" for stage, count in sorted(by_stage.items()))
    figure = f"{len(seen)} of {len(finished)} finished attempts have one, all hashed again ({told})"
    return line_of("episodes", problems, figure, figures={"finished": float(len(finished)), "read": float(len(seen))})


def check_closing(book: Book) -> Line:
    """accepted = trained + queued + rejected: each attempt of the RL stage is in exactly one of the three.

    Accepted are the attempts with a final result; trained, the members of batches whose version was published (blobs
    and store); rejected, those of rejected groups; queued, those of groups that stand in no trained batch.
    """
    name = "accounting closes"
    accepted = {row.id: row.group_id for row in book.attempts("rl") if row.outcome is not None}
    if not accepted:
        return unseen(name, "no attempt of the RL stage has finished")
    trained = {item["attempt_id"] for batch in book.trained().values() for item in batch["items"]}
    trained_groups = {item["group_id"] for batch in book.trained().values() for item in batch["items"]}
    states = {group_id: book.run.groups[group_id].state for group_id in accepted.values()}
    rejected = [a for a, group_id in accepted.items() if states[group_id] == "rejected"]
    queued = [a for a, g in accepted.items() if states[g] != "rejected" and g not in trained_groups]
    problems = [f"attempt {a} was trained and never accepted" for a in sorted(trained - accepted.keys())]
    problems += [f"attempt {a} was trained and rejected" for a in sorted(trained & set(rejected))]
    total = len(trained) + len(queued) + len(rejected)
    if total != len(accepted):
        problems.append(f"{len(accepted)} accepted, and trained + queued + rejected = {total}")
    for group in book.run.groups.values():
        if group.batch is not None and group.state != "batched":
            problems.append(f"group {group.id} is {group.state} and in batch {group.batch}")
        members = {item["group_id"] for item in book.batches.get(group.batch or 0, {"items": []})["items"]}
        if group.batch is not None and group.batch in book.batches and group.id not in members:
            problems.append(f"group {group.id} is said to be in batch {group.batch}, and it is not")
    figure = f"{len(accepted)} accepted = {len(trained)} trained + {len(queued)} queued + {len(rejected)} rejected"
    lost = ", ".join(f"{count} {how}" for how, count in sorted(book.run.journal.num_lost.items()))
    counts = {"accepted": len(accepted), "trained": len(trained), "queued": len(queued), "rejected": len(rejected)}
    detail = f"leases that ended without a result: {lost or 'none'}"
    return line_of(name, problems, figure, detail, {key: float(value) for key, value in counts.items()})


def check_rejections(book: Book) -> Line:
    """Every rejection has its reason, and is told by length: rejecting by age would remove the long episodes."""
    name = "rejections"
    groups = [group for group in book.run.groups.values() if group.stage == "rl"]
    if not groups:
        return unseen(name, "no group of the RL stage was issued")
    rejected = [group for group in groups if group.state == "rejected"]
    problems = [f"group {group.id} was rejected without a reason" for group in rejected if not group.reason.strip()]
    reasons = Counter(group.reason for group in rejected)
    ids = {group.id for group in rejected}
    lengths = [(f.total_tokens, f.group_id in ids) for f in book.facts.values() if f.stage == "rl"]
    figure = f"{len(rejected)} of {len(groups)} groups"
    if rejected:
        figure += f"; by length decile, shortest first: {' '.join(map(str, by_decile(lengths)))} attempts"
    detail = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(3))
    return line_of(name, problems, figure, detail, {"groups": float(len(groups)), "rejected": float(len(rejected))})


def by_decile(lengths: list[tuple[int, bool]]) -> list[int]:
    """How many are marked, in each tenth of all by length."""
    counts = [0] * 10
    for rank, (_, marked) in enumerate(sorted(lengths)):
        counts[rank * 10 // len(lengths)] += marked
    return counts


def check_once(book: Book) -> Line:
    """No attempt and no sampled token is trained twice, and each version is made from the batch of its number."""
    name = "exactly once"
    if not book.run.batches:
        return unseen(name, "no batch was assigned")
    problems = list(book.batch_problems)
    for index, digest in sorted(book.digests.items()):
        if digest != book.run.batches[index].digest:
            problems.append(f"batch {index} is no longer the record that was assigned")
        if book.batches[index]["index"] != index:
            problems.append(f"batch {index} says that it is batch {book.batches[index]['index']}")
    expected = list(range(len(book.run.batches)))
    if sorted(book.run.batches) != expected:
        problems.append(f"the batches are numbered {sorted(book.run.batches)}")
    for version, manifest in sorted(book.run.manifests.items()):
        if version > 0 and manifest["batch"] != book.digests.get(version - 1):
            problems.append(f"version {version} was not made from batch {version - 1}")
    owner: dict[str, int] = {}
    tokens = 0
    for index, batch in sorted(book.batches.items()):
        for item in batch["items"]:
            if item["attempt_id"] in owner:
                problems.append(f"attempt {item['attempt_id']} is in batches {owner[item['attempt_id']]} and {index}")
            owner[item["attempt_id"]] = index
            row = book.run.attempts.get(item["attempt_id"])
            if row is None or row.episode != item["episode"]:
                problems.append(f"batch {index}: attempt {item['attempt_id']} has another episode in the journal")
            if item["attempt_id"] in book.facts:
                tokens += book.facts[item["attempt_id"]].sampled_tokens
    problems += _updates(book)
    figure = (
        f"{len(owner)} attempts, {tokens} sampled tokens, {len(book.batches)} batches, {len(book.trained())} trained"
    )
    return line_of(name, problems, figure, figures={"attempts": float(len(owner)), "sampled_tokens": float(tokens)})


def _updates(book: Book) -> list[str]:
    """The learner's own log names each version once, none that was not published, and as many trained tokens as its
    batch has sampled ones."""
    rows = [row for row in book.run.metrics if row.get("stage") == "rl" and isinstance(row.get("version"), int)]
    logged = Counter(row["version"] for row in rows)
    problems = [f"version {version} was logged {count} times" for version, count in sorted(logged.items()) if count > 1]
    problems += [f"version {v} was logged and never published" for v in sorted(logged) if v not in book.run.manifests]
    for row in rows:
        items = book.batches.get(row["version"] - 1, {"items": []})["items"]
        facts = [book.facts[item["attempt_id"]] for item in items if item["attempt_id"] in book.facts]
        sampled = sum(one.sampled_tokens for one in facts)
        trained = row.get("num_loss_tokens", sampled)
        if len(facts) == len(items) and trained != sampled:
            problems.append(f"version {row['version']} was trained on {trained:g} tokens, its batch sampled {sampled}")
    return problems


def check_groups(book: Book) -> Line:
    """Batches hold whole groups of the right size, with A_i = R_i − mean(R) recomputed from the episodes."""
    name = "whole groups"
    if not book.batches:
        return unseen(name, "no batch could be read")
    problems: list[str] = []
    num_groups = num_equal = 0
    is_control = bool(book.run.journal.config.get("shuffled_rewards"))
    for index, batch in sorted(book.batches.items()):
        dealt = _dealt_rewards(book, index, batch) if is_control else {}
        members: dict[str, list[dict[str, Any]]] = {}
        for item in batch["items"]:
            members.setdefault(item["group_id"], []).append(item)
        for group_id, items in members.items():
            num_groups += 1
            where = f"batch {index}, group {group_id}"
            issued = {row.id for row in book.run.attempts.values() if row.group_id == group_id}
            if len(items) != batch["group_size"] or {item["attempt_id"] for item in items} != issued:
                problems.append(f"{where}: {len(items)} attempts of {batch['group_size']}, {len(issued)} issued")
            if len({item["task_id"] for item in items}) != 1:
                problems.append(f"{where} mixes tasks")
            equal, group_problems = _advantages(book, where, items, dealt)
            num_equal += equal
            problems += group_problems
    figure = f"{num_groups} groups, advantages recomputed; {num_equal} all-equal with exactly 0"
    if is_control:
        figure += "; a control: the rewards of each batch were shuffled across its groups"
    return line_of(name, problems, figure, figures={"groups": float(num_groups), "all_equal": float(num_equal)})


def _dealt_rewards(book: Book, index: int, batch: dict[str, Any]) -> dict[str, float]:
    """Attempt → the reward that a control dealt to it, from the run's seed; empty where an episode is missing."""
    names = [item["attempt_id"] for item in batch["items"]]
    if not set(names) <= book.facts.keys():
        return {}
    rewards = [book.facts[name].reward for name in names]
    random.Random(f"{book.run.journal.meta['seed']}/{index}/rewards").shuffle(rewards)
    return dict(zip(names, rewards, strict=True))


def _advantages(book: Book, where: str, items: list[dict[str, Any]], dealt: dict[str, float]) -> tuple[bool, list[str]]:
    rewards = []
    for item in items:
        facts = book.facts.get(item["attempt_id"])
        if facts is None:
            return False, [f"{where}: attempt {item['attempt_id']} has no readable episode"]
        rewards.append(facts.reward)
    credited = [dealt.get(item["attempt_id"], reward) for item, reward in zip(items, rewards, strict=True)]
    mean = sum(credited) / len(credited)
    equal = len(set(credited)) == 1
    problems = []
    for item, reward, credit in zip(items, rewards, credited, strict=True):
        expected = 0.0 if equal else credit - mean
        right = abs(item["advantage"] - expected) <= (0.0 if equal else 1e-9)  # false for NaN
        if item["reward"] != reward or not right:
            problems.append(
                f"{where}, attempt {item['attempt_id']}: reward {item['reward']} and advantage {item['advantage']}, "
                f"recomputed {reward} and {expected}"
            )
    return equal, problems


def check_ages(book: Book, bound: int | None) -> Line:
    """Age = learner version − oldest sampled version of the episode, queue time included, never above the bound."""
    name = "ages"
    ages: list[float] = []
    token_ages: Counter[int] = Counter()
    problems: list[str] = []
    for index, batch in sorted(book.batches.items()):
        for item in batch["items"]:
            facts = book.facts.get(item["attempt_id"])
            if facts is None or facts.oldest_version < 0:
                problems.append(f"batch {index}: the age of attempt {item['attempt_id']} is unknown")
                continue
            age = index - facts.oldest_version
            ages.append(float(age))
            token_ages.update({index - version: count for version, count in facts.version_counts.items()})
            if bound is not None and age > bound:
                problems.append(
                    f"batch {index}: attempt {item['attempt_id']} is {age} versions old, the bound is {bound}"
                )
            if facts.newest_version > index:
                problems.append(
                    f"batch {index}: attempt {item['attempt_id']} has tokens of version {facts.newest_version}"
                )
            if item["oldest_version"] != facts.oldest_version:
                problems.append(f"batch {index}: attempt {item['attempt_id']} is recorded with another oldest version")
    if not ages:
        return unseen(name, "no batch could be read")
    if bound is None:
        problems.append("the run does not say what its bound is")
    p50, p99, largest = quantiles(ages)
    num_tokens = sum(token_ages.values())
    mean_token = sum(age * count for age, count in token_ages.items()) / max(num_tokens, 1)
    told = "unknown" if bound is None else str(bound)
    figure = f"p50 {p50:g}, p99 {p99:g}, max {largest:g}, bound {told}; sampled tokens {mean_token:.2f} on average"
    figures = {"p50": p50, "p99": p99, "max": largest, "token_mean": mean_token}
    return line_of(name, problems, figure, figures=figures | ({} if bound is None else {"bound": float(bound)}))
