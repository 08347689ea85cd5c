"""Whether the engine sampled from the policy that was published: a fresh forward pass over what it recorded.

A seeded sample of generations whose tokens, and all KV rows under them, are of one version. Temperature and support
are applied, recorded routes are forced, everything is float64 (law 8).

Engine and learner compute in float32, and how much its rounding does to a logprob depends on the policy. Where a gap
exceeds the bound, the same pass is made in float32: the bound is then `FLOOR_FACTOR` times what rounding alone does to
that generation, said so in the line, and `CEILING` at most.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.reports.audit.deltas import Versions
from tidemill.reports.audit.episodes import Sampled, SegmentFacts, segments_of
from tidemill.reports.audit.forward import Tensors, check_config, forward, logprob, widened
from tidemill.reports.audit.readers import Run
from tidemill.reports.audit.report import Line, line_of, quantiles, unseen

NAME = "logprob parity"
FLOOR_FACTOR = 4.0
CEILING = 1e-4

Policy = tuple[dict[str, Any], Tensors]


@dataclass(kw_only=True)
class _Tally:
    gaps: list[float] = field(default_factory=list)
    largest: float = -1.0
    worst: str = ""
    num_above: int = 0
    """Generations with a gap above the tolerance, though within what float32 allows them."""
    versions: set[int] = field(default_factory=set)
    temperatures: set[float] = field(default_factory=set)
    num_supports: int = 0
    routed: int = 0
    rerouted: int = 0
    problems: list[str] = field(default_factory=list)


def check_parity(run: Run, candidates: dict[str, int], *, num_generations: int, seed: int, tolerance: float) -> Line:
    """`candidates`: episode blob → how many of its generations are of a single version."""
    pool = [(blob, index) for blob, count in sorted(candidates.items()) for index in range(count)]
    if not pool:
        return unseen(NAME, "no generation was sampled from one version alone")
    chosen: dict[str, list[int]] = {}
    for blob, index in random.Random(seed).sample(pool, min(num_generations, len(pool))):
        chosen.setdefault(blob, []).append(index)
    tally = _Tally()
    policies = _Policies(run)
    work: list[tuple[int, str, SegmentFacts, Sampled]] = []
    for blob, indices in sorted(chosen.items()):
        segments = segments_of(run.blobs.record(blob)[0], [])
        singles = [
            (g.single_version, blob, segment, g)
            for segment in segments
            for g in segment.generations
            if g.single_version is not None
        ]
        work += [singles[index] for index in indices]
    for version, blob, segment, generation in sorted(work, key=lambda item: (item[0], item[1])):
        where = f"episode {blob[:12]}, segment {generation.segment}, step {generation.step}"
        try:
            _compare(policies.get(version), segment, generation, where, tally, tolerance=tolerance)
        except (ValueError, KeyError, IndexError) as error:
            tally.problems.append(f"{where}: cannot be recomputed at version {version}: {error}")
    return _line(tally, sum(map(len, chosen.values())), len(pool), tolerance)


class _Policies:
    """Weights of one version at a time: the work comes sorted by version."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._weights = Versions(run)
        self._version = -1
        self._policy: Policy | None = None

    def get(self, version: int) -> Policy:
        if self._policy is None or version != self._version:
            if version not in self._run.manifests:
                raise ValueError("it was never published")
            files = self._run.manifests[version]["files"]
            config = json.loads(self._run.store_blobs.get(files["config.json"]))
            check_config(config)
            self._policy = (config, widened(self._weights.get(version)))
            self._version = version
        return self._policy


def _compare(
    policy: Policy, segment: SegmentFacts, generation: Sampled, where: str, tally: _Tally, *, tolerance: float
) -> None:
    expected, counts = _logprobs(policy, segment, generation)
    tally.routed += counts["routed"]
    tally.rerouted += counts["rerouted"]
    tally.versions.add(int(generation.versions[0]))
    tally.temperatures.add(generation.temperature)
    tally.num_supports += generation.supports is not None
    gaps = np.abs(expected - generation.logprobs.astype(np.float64))
    if not np.isfinite(gaps).all():
        token = int(np.nonzero(~np.isfinite(gaps))[0][0])
        told = f"{generation.logprobs[token]}, expected {expected[token]}"
        tally.problems.append(f"{where}: token {token} has logprob {told}")
        return
    tally.gaps += gaps.tolist()
    largest, token = float(gaps.max()), int(gaps.argmax())
    told = f"{where}, token {token}: {generation.logprobs[token]:.6f}, expected {expected[token]:.6f}"
    if largest > tally.largest:
        tally.largest, tally.worst = largest, told
    if largest > tolerance:
        config, tensors = policy
        rough, _ = _logprobs((config, {k: v.astype(np.float32) for k, v in tensors.items()}), segment, generation)
        if largest <= min(CEILING, FLOOR_FACTOR * float(np.abs(rough - expected).max())):
            tally.num_above += 1
        else:
            tally.problems.append(told)


def _logprobs(policy: Policy, segment: SegmentFacts, generation: Sampled) -> tuple[NDArray[Any], dict[str, int]]:
    """`[T]`, of the sampled tokens under the policy, and the counts of the forward pass."""
    if generation.start == 0:
        raise ValueError("its first token was sampled from no prompt")
    config, tensors = policy
    end = generation.start + len(generation.token_ids)
    routes: NDArray[Any] | None = None if segment.routes is None else segment.routes[: end - 1]
    logits, counts = forward(config, tensors, segment.token_ids[: end - 1], routes)
    values = []
    for t, token in enumerate(generation.token_ids.tolist()):
        support = None if generation.supports is None or not len(generation.supports[t]) else generation.supports[t]
        values.append(logprob(logits[generation.start + t - 1], token, generation.temperature, support))
    return np.array(values), counts


def _line(tally: _Tally, num_chosen: int, num_pool: int, tolerance: float) -> Line:
    median, p99, largest = quantiles(tally.gaps) or (0.0, 0.0, 0.0)
    if tally.problems and tally.worst:
        tally.problems.insert(0, f"largest: {tally.worst}")
    temperatures = ", ".join(f"{t:g}" for t in sorted(tally.temperatures))
    figure = (
        f"max |Δ logp| {largest:.1e}, p99 {p99:.1e} over {len(tally.gaps)} tokens of {num_chosen} generations "
        f"({num_pool} could be checked), {len(tally.versions)} versions"
    )
    bound = f"bound {tolerance:g}"
    if tally.num_above:
        bound += f", which {tally.num_above} generations exceed within {FLOOR_FACTOR:g} × the rounding of float32"
    detail = (
        f"{bound}; temperature {temperatures}; {tally.num_supports} with a recorded support; "
        f"{tally.routed} routes forced, {tally.rerouted} of them not this pass's own choice"
    )
    figures = {
        "max": largest,
        "p99": p99,
        "p50": median,
        "tokens": float(len(tally.gaps)),
        "generations": float(num_chosen),
        "eligible": float(num_pool),
        "versions": float(len(tally.versions)),
        "rerouted": float(tally.rerouted),
        "routed": float(tally.routed),
        "above": float(tally.num_above),
    }
    return line_of(NAME, tally.problems, figure, detail, figures)
