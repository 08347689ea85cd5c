"""From an episode to the sequences that are trained on, token for token (law 1).

| array        | sampled here    | prompt, observation, or trained elsewhere |
|--------------|-----------------|-------------------------------------------|
| sampled_mask | True            | False                                     |
| logprobs     | as sampled      | NaN, so that a wrong mask is loud         |
| versions     | as sampled      | −1                                        |
| supports     | as sampled      | empty                                     |
| routes       | where reported, in the order of the reports; elsewhere `ROUTE_SENTINEL`     |
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidemill.core.records import ROUTE_SENTINEL, Array, Episode, Generation, Segment, Trajectory, digest


def trajectories(episode: Episode) -> list[Trajectory]:
    """One trajectory per segment. A sampled token belongs to the first one that contains it: where a segment is a
    branch of an earlier one (its leading generations are the same, arrays and all), the shared part is masked.

    Raises `ValueError` where an episode does not fit together: a missing logprob, a position that is not the next.
    """
    built: list[Trajectory] = []
    earlier: list[list[str]] = []
    for index, segment in enumerate(episode.segments):
        names = [digest(step.generation) for step in segment.steps]
        num_shared = max((_num_common(names, other) for other in earlier), default=0)
        earlier.append(names)
        built.append(_trajectory(episode.attempt_id, index, segment, num_shared))
    return built


def without_steps(trajectory: Trajectory, segment: Segment, steps: Sequence[int]) -> Trajectory:
    """The trajectory with what these steps of its segment sampled as context, not to be trained."""
    mask = trajectory.sampled_mask.numpy().copy()
    for index in steps:
        generation = segment.steps[index].generation
        start = generation.position + generation.prompt_ids.shape[0]
        mask[start : start + generation.token_ids.shape[0]] = False
    return msgspec.structs.replace(trajectory, sampled_mask=Array.of(mask, "bool"))


def _num_common(left: Sequence[str], right: Sequence[str]) -> int:
    """How many leading generations are the same."""
    num = 0
    while num < min(len(left), len(right)) and left[num] == right[num]:
        num += 1
    return num


def _trajectory(attempt_id: str, index: int, segment: Segment, num_shared: int) -> Trajectory:
    generations = [step.generation for step in segment.steps]
    if not generations:
        raise ValueError(f"segment {index} of {attempt_id} has no generation: leave it out of the episode")
    temperatures = {generation.temperature for generation in generations}
    if len(temperatures) > 1:
        raise ValueError(f"segment {index} of {attempt_id} mixes temperatures {sorted(temperatures)}")
    token_ids: list[NDArray[Any]] = []
    logprobs: list[NDArray[Any]] = []
    versions: list[NDArray[Any]] = []
    masks: list[NDArray[Any]] = []
    position = 0

    def put(ids: NDArray[Any], trained: Generation | None) -> None:
        nonlocal position
        num = len(ids)
        token_ids.append(ids)
        masks.append(np.full(num, trained is not None))
        logprobs.append(np.full(num, np.nan, np.float32) if trained is None else trained.logprobs.numpy())
        versions.append(np.full(num, -1, np.int32) if trained is None else trained.versions.numpy())
        position += num

    for number, generation in enumerate(generations):
        where = f"generation {number} of segment {index} of {attempt_id}"
        if generation.position != position:
            raise ValueError(f"{where} begins at {generation.position}, expected {position}")
        _check(generation, where)
        put(generation.prompt_ids.numpy(), None)
        put(generation.token_ids.numpy(), generation if number >= num_shared else None)
    put(segment.closing_ids.numpy(), None)
    supports = _supports(generations, num_shared, position)
    return Trajectory(
        attempt_id=attempt_id,
        segment=index,
        token_ids=Array.of(np.concatenate(token_ids), "int32"),
        sampled_mask=Array.of(np.concatenate(masks), "bool"),
        logprobs=Array.of(np.concatenate(logprobs), "float32"),
        versions=Array.of(np.concatenate(versions), "int32"),
        routes=_routes(generations, position),
        support_ids=supports[0],
        support_offsets=supports[1],
        temperature=temperatures.pop(),
    )


def _supports(generations: Sequence[Generation], num_shared: int, num_tokens: int) -> tuple[Array | None, Array | None]:
    """int32 [S] and int32 [N+1]: the ids that could be sampled, per token; both None where all were always free."""
    widths = np.zeros(num_tokens, np.int64)
    ids: list[NDArray[Any]] = []
    for generation in generations[num_shared:]:
        if generation.support_ids is not None and generation.support_offsets is not None:
            start = generation.position + generation.prompt_ids.shape[0]
            widths[start : start + generation.token_ids.shape[0]] = np.diff(generation.support_offsets.numpy())
            ids.append(generation.support_ids.numpy())
    if not widths.any():
        return None, None
    return Array.of(np.concatenate(ids), "int32"), Array.of(np.cumsum([0, *widths]), "int32")


def _check(generation: Generation, where: str) -> None:
    num = generation.token_ids.shape[0]
    if generation.logprobs.shape != (num,) or generation.versions.shape != (num,):
        raise ValueError(
            f"{where}: {num} sampled tokens, {generation.logprobs.shape[0]} logprobs, {generation.versions.shape[0]} "
            "versions: none may be missing"
        )
    if not np.isfinite(generation.logprobs.numpy()).all():
        raise ValueError(f"{where}: a sampled token has no finite logprob")


def _routes(generations: Sequence[Generation], num_tokens: int) -> Array | None:
    """uint16 [N, L, k]: the first report of a position stands: its KV was what later tokens were sampled under."""
    reports = [
        (generation.row_start, generation.routes.numpy()) for generation in generations if generation.routes is not None
    ]
    if not reports:
        return None
    shapes = {rows.shape[1:] for _, rows in reports}
    if len(shapes) > 1:
        raise ValueError(f"routes of different shapes {sorted(shapes)} in one segment")
    routes = np.full((num_tokens, *shapes.pop()), ROUTE_SENTINEL, np.uint16)
    is_known = np.zeros(num_tokens, bool)
    for start, rows in reports:
        if start < 0 or start + len(rows) > num_tokens:
            raise ValueError(f"routes of positions {start} to {start + len(rows)} in a segment of {num_tokens}")
        here = slice(start, start + len(rows))
        fresh = ~is_known[here] & (rows != ROUTE_SENTINEL).any(axis=(1, 2))
        routes[here][fresh] = rows[fresh]
        is_known[here] |= fresh
    return Array.of(routes, "uint16")
