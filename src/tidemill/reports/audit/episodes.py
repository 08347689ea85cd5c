"""Facts about an episode, counted from its blob alone.

An episode is decoded without a schema (maps, lists, buffers): what is expected of it is written here a second time,
on purpose, and not taken from the records that the services use.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

SENTINEL = 0xFFFF
"""Expert id of a position whose route is not known."""
ROUNDING = 1e-5
"""How far above 0 float32 may carry a logprob."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One generation, placed in its segment, with what a fresh forward pass needs of it."""

    segment: int
    step: int
    start: int
    """Index in the segment of the first sampled token."""
    token_ids: NDArray[Any]
    logprobs: NDArray[Any]
    versions: NDArray[Any]
    temperature: float
    supports: list[NDArray[Any]] | None
    single_version: int | None
    """The version, where all of its tokens and all of the KV rows that they saw are of one; else None."""


@dataclass(frozen=True, kw_only=True)
class SegmentFacts:
    """One segment: its ids, and the routes that stand for its positions (sentinel where none was reported)."""

    token_ids: NDArray[Any]
    sampled: NDArray[Any]
    kv_versions: NDArray[Any]
    """−1 where a position was never fed."""
    routes: NDArray[Any] | None
    generations: list[Sampled]


@dataclass(frozen=True, kw_only=True)
class EpisodeFacts:
    """What accounting, ages and the ledger need; the segments are dropped once they are counted."""

    attempt_id: str
    group_id: str
    task_id: str
    stage: str
    outcome: str
    reward: float
    rewards: dict[str, float]
    oldest_version: int
    newest_version: int
    sampled_tokens: int
    total_tokens: int
    fed_positions: int
    unknown_rows: int
    """Positions before a sampled token of which no engine reported the state."""
    mean_context: float
    num_generations: int
    num_spanning: int
    """Generations whose tokens are of two versions or more."""
    num_single: int
    """Generations that a fresh forward pass can check."""
    version_counts: dict[int, int]
    """Version → sampled tokens."""
    cpu_s: dict[str, float]
    timings_s: dict[str, float]
    problems: list[str] = field(default_factory=list)


def array(value: dict[str, Any]) -> NDArray[Any]:
    """Buffer + dtype + shape. Raises `ValueError` where they disagree."""
    dtype = np.dtype(value["dtype"]).newbyteorder("<")
    return np.frombuffer(value["data"], dtype=dtype).reshape(value["shape"])


def segments_of(episode: dict[str, Any], problems: list[str]) -> list[SegmentFacts]:
    """Place every generation of an episode; what does not fit is added to `problems`."""
    return [_segment(index, segment, problems) for index, segment in enumerate(episode["segments"])]


def _segment(index: int, segment: dict[str, Any], problems: list[str]) -> SegmentFacts:
    pieces: list[NDArray[Any]] = []
    marks: list[NDArray[Any]] = []
    generations: list[Sampled] = []
    rows = _Rows()
    position = 0
    for number, step in enumerate(segment["steps"]):
        generation = step["generation"]
        where = f"segment {index}, step {number}"
        prompt, tokens = array(generation["prompt_ids"]), array(generation["token_ids"])
        logprobs, versions = array(generation["logprobs"]), array(generation["versions"])
        if generation["position"] != position:
            problems.append(f"{where}: at position {generation['position']}, and {position} ids came before")
        start = position + len(prompt)
        position = start + len(tokens)
        rows.add(generation, position, where, problems)
        _check_tokens(where, tokens, logprobs, versions, problems)
        supports = _supports(generation, tokens, where, problems)
        generations.append(
            Sampled(
                segment=index,
                step=number,
                start=start,
                token_ids=tokens,
                logprobs=logprobs,
                versions=versions,
                temperature=generation["temperature"],
                supports=supports,
                single_version=rows.single_version(versions, position),
            )
        )
        pieces += [prompt, tokens]
        marks += [np.zeros(len(prompt), dtype=bool), np.ones(len(tokens), dtype=bool)]
    closing = array(segment["closing_ids"])
    token_ids = np.concatenate([*pieces, closing]) if pieces else closing
    sampled = np.concatenate([*marks, np.zeros(len(closing), dtype=bool)]) if marks else np.zeros(len(closing), bool)
    return SegmentFacts(
        token_ids=token_ids,
        sampled=sampled,
        kv_versions=rows.versions_of(len(token_ids)),
        routes=rows.routes_of(len(token_ids)),
        generations=generations,
    )


class _Rows:
    """KV versions and routes by position: where a position was reported twice, the first report stands."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._routes: list[NDArray[Any]] = []
        self._has_routes = False

    def add(self, generation: dict[str, Any], end: int, where: str, problems: list[str]) -> None:
        versions = array(generation["kv_versions"])
        routes = None if generation["routes"] is None else array(generation["routes"])
        start, known = generation["row_start"], len(self._versions)
        if routes is not None and len(routes) != len(versions):
            problems.append(f"{where}: {len(routes)} rows of routes and {len(versions)} of KV versions")
            routes = routes[: len(versions)]
        if not len(versions):
            return
        if start > known:  # an engine went away with them: such positions stay unknown, and cannot be checked
            self._versions += [-1] * (start - known)
            if routes is not None:
                self._routes += [np.full_like(routes[0], SENTINEL)] * (start - known)
            known = start
        if start + len(versions) > end:
            problems.append(f"{where}: rows up to {start + len(versions)}, and only {end} ids so far")
        self._versions += versions[known - start :].tolist()
        if routes is not None:
            self._has_routes = True
            self._routes += list(routes[known - start :])

    def single_version(self, versions: NDArray[Any], end: int) -> int | None:
        """Of tokens and KV rows together; the last token is never fed, so `end − 1` rows are needed."""
        seen = set(versions.tolist()) | set(self._versions[: max(end - 1, 0)])
        fed_all = len(self._versions) >= end - 1 and (not self._has_routes or len(self._routes) >= end - 1)
        return seen.pop() if len(versions) and len(seen) == 1 and fed_all else None

    def versions_of(self, length: int) -> NDArray[Any]:
        result = np.full(length, -1, dtype=np.int64)
        known = self._versions[:length]
        result[: len(known)] = known
        return result

    def routes_of(self, length: int) -> NDArray[Any] | None:
        if not self._has_routes:
            return None
        result = np.full((length, *self._routes[0].shape), SENTINEL, dtype=np.uint16)
        known = self._routes[:length]
        result[: len(known)] = np.stack(known)
        return result


def _check_tokens(
    where: str, tokens: NDArray[Any], logprobs: NDArray[Any], versions: NDArray[Any], problems: list[str]
) -> None:
    if not len(tokens) == len(logprobs) == len(versions):
        problems.append(f"{where}: {len(tokens)} tokens, {len(logprobs)} logprobs, {len(versions)} versions")
        return
    if not np.isfinite(logprobs).all():
        problems.append(f"{where}: a logprob that is not finite")
    elif (logprobs > ROUNDING).any():
        problems.append(f"{where}: logprob {logprobs.max():.3g}, above 0")
    if (np.diff(versions) < 0).any():
        problems.append(f"{where}: versions go back inside the generation")
    if (tokens < 0).any():
        problems.append(f"{where}: a negative token id")


def _supports(
    generation: dict[str, Any], tokens: NDArray[Any], where: str, problems: list[str]
) -> list[NDArray[Any]] | None:
    narrowed = generation["top_k"] > 0 or generation["top_p"] < 1.0
    if generation["support_ids"] is None:
        if narrowed and generation["temperature"] > 0:
            problems.append(f"{where}: top-p or top-k was used and the support is not recorded")
        return None
    ids, offsets = array(generation["support_ids"]), array(generation["support_offsets"])
    if (
        len(offsets) != len(tokens) + 1
        or offsets[0] != 0
        or offsets[-1] != len(ids)
        or (np.diff(offsets) < narrowed).any()
    ):
        problems.append(f"{where}: the offsets of its support do not fit {len(tokens)} tokens and {len(ids)} ids")
        return None
    supports = [ids[offsets[t] : offsets[t + 1]] for t in range(len(tokens))]
    for token, support in zip(tokens.tolist(), supports, strict=True):
        if len(support) and token not in support:  # an empty one left the choice free
            problems.append(f"{where}: token {token} is outside of its support")
            break
    return supports


def _unknown_rows(segment: SegmentFacts) -> int:
    if not segment.generations:
        return 0
    last = segment.generations[-1]
    return int((segment.kv_versions[: last.start + max(len(last.token_ids) - 1, 0)] < 0).sum())


def facts_of(episode: dict[str, Any]) -> tuple[EpisodeFacts, list[SegmentFacts]]:
    """Count one episode."""
    problems: list[str] = []
    segments = segments_of(episode, problems)
    generations = [generation for segment in segments for generation in segment.generations]
    counts: dict[int, int] = {}
    for generation in generations:
        for version, count in zip(*np.unique(generation.versions, return_counts=True), strict=True):
            counts[int(version)] = counts.get(int(version), 0) + int(count)
    if not abs(sum(episode["rewards"].values()) - episode["reward"]) <= 1e-9:  # NaN, too
        problems.append(f"reward {episode['reward']} is not the sum of its parts {episode['rewards']}")
    fed = [int((segment.kv_versions >= 0).sum()) for segment in segments]
    num_fed = sum(fed)
    facts = EpisodeFacts(
        attempt_id=episode["attempt_id"],
        group_id=episode["group_id"],
        task_id=episode["task_id"],
        stage=episode["stage"],
        outcome=episode["outcome"],
        reward=episode["reward"],
        rewards=episode["rewards"],
        oldest_version=min(counts, default=-1),
        newest_version=max(counts, default=-1),
        sampled_tokens=sum(int(segment.sampled.sum()) for segment in segments),
        total_tokens=sum(len(segment.token_ids) for segment in segments),
        fed_positions=num_fed,
        unknown_rows=sum(_unknown_rows(segment) for segment in segments),
        mean_context=sum(n * (n + 1) / 2 for n in fed) / num_fed if num_fed else 0.0,
        num_generations=len(generations),
        num_spanning=sum(len(np.unique(generation.versions)) > 1 for generation in generations),
        num_single=sum(generation.single_version is not None for generation in generations),
        version_counts=counts,
        cpu_s=episode["cpu_s"],
        timings_s=episode["timings_s"],
        problems=problems,
    )
    return facts, segments
