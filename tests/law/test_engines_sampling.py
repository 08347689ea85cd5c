"""Tokens are drawn from the distribution whose log-probability is recorded."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.engines.sampling import Policy, sample, uniforms

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -2.0, 1.0])


def reference(policy: Policy) -> dict[int, float]:
    """id → probability, by the definition, without tensors."""
    temperature = policy.temperature or 1.0
    allowed = range(7) if policy.allowed_ids is None else policy.allowed_ids.tolist()
    weights = sorted(((math.exp(float(LOGITS[i]) / temperature), -i) for i in allowed), reverse=True)
    if policy.top_k:
        weights = weights[: policy.top_k]
    total, before, kept = sum(w for w, _ in weights), 0.0, []
    for weight, minus_id in weights:
        if before < policy.top_p * total or policy.top_p == 1.0:
            kept.append((weight, -minus_id))
        before += weight
    total = sum(w for w, _ in kept)
    return {i: w / total for w, i in kept}


POLICIES = {
    "plain": Policy(1.0, 1.0, 0, None, 0),
    "cool": Policy(0.6, 1.0, 0, None, 0),
    "hot": Policy(2.5, 1.0, 0, None, 0),
    "top-k": Policy(1.0, 1.0, 3, None, 0),
    "top-k of one": Policy(1.0, 1.0, 1, None, 0),
    "top-k above the vocabulary": Policy(1.0, 1.0, 99, None, 0),
    "top-p": Policy(1.0, 0.7, 0, None, 0),
    "tiny top-p": Policy(1.0, 1e-6, 0, None, 0),
    "both, warm": Policy(1.4, 0.8, 4, None, 0),
    "allowed": Policy(1.0, 1.0, 0, torch.tensor([1, 3, 5]), 0),
    "allowed, top-k, top-p": Policy(1.3, 0.9, 2, torch.tensor([1, 3, 5]), 0),
}


@pytest.mark.parametrize("name", POLICIES)
def test_frequencies_logprobs_and_support(name: str) -> None:
    """Chi-square at p = 1e-4 over 40,000 seeds (fixed, so that the outcome is)."""
    policy, num_draws = POLICIES[name], 40_000
    expected = reference(policy)
    draws = uniforms(range(num_draws), [17] * num_draws)
    counts = dict.fromkeys(range(7), 0)
    for start in range(0, num_draws, 20_000):
        u = draws[start : start + 20_000]
        # One policy for all rows; the restricted path goes row by row, so it is asked for few rows and re-weighted.
        if policy.is_restricted:
            one = sample(LOGITS[None], [policy], u[:1])
            assert one.supports == [sorted(expected)]
            masked = torch.full((7,), float("-inf"))
            masked[list(expected)] = LOGITS[list(expected)]
            rows = sample(masked.expand(len(u), 7), [Policy(policy.temperature, 1.0, 0, None, 0)] * len(u), u)
        else:
            rows = sample(LOGITS.expand(len(u), 7), [policy] * len(u), u)
            assert rows.supports == [None] * len(u)
        for token, logprob in zip(rows.ids, rows.logprobs, strict=True):
            counts[token] += 1
            assert abs(logprob - math.log(expected[token])) < 1e-5
    assert {i for i, n in counts.items() if n} <= expected.keys()
    statistic = sum((counts[i] - num_draws * p) ** 2 / (num_draws * p) for i, p in expected.items())
    assert statistic < 35.0, (statistic, counts)  # chi-square, at most 6 degrees of freedom: p(> 35) = 4e-6


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.0, 3.0).filter(lambda t: t == 0 or t > 0.05),
    st.floats(0.01, 1.0),
    st.integers(0, 9),
    st.none() | st.sets(st.integers(0, 6), min_size=1),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_every_draw_lies_in_its_support_and_is_renormalised(
    temperature: float, top_p: float, top_k: int, allowed: set[int] | None, u: float
) -> None:
    policy = Policy(temperature, top_p, top_k, None if allowed is None else torch.tensor(sorted(allowed)), 0)
    other = Policy(1.0, 1.0, 0, None, 0)
    drawn = sample(torch.stack([LOGITS, LOGITS]), [other, policy], np.array([0.5, u]))
    expected = reference(policy)
    support = drawn.supports[1] or list(range(7))
    if abs(top_p - 1) > 1e-6:
        boundary = any(abs(sum(sorted(expected.values(), reverse=True)[:n]) - top_p) < 1e-6 for n in range(8))
        assert boundary or set(support) == expected.keys()
    if set(support) == expected.keys():
        assert abs(drawn.logprobs[1] - math.log(expected[drawn.ids[1]])) < 1e-4
    assert drawn.ids[1] in support
    if temperature == 0:
        assert drawn.ids[1] == max(support, key=lambda i: (float(LOGITS[i]), -i))
    assert drawn.ids[0] == sample(LOGITS[None], [other], np.array([0.5])).ids[0]


def test_uniforms_are_uniform_and_depend_on_seed_and_position_alone() -> None:
    along_seeds, along_positions = uniforms(range(4096), [5] * 4096), uniforms([5] * 4096, range(4096))
    for draws in (along_seeds, along_positions):
        assert draws.min() >= 0 and draws.max() < 1
        counts = np.histogram(draws, bins=16, range=(0, 1))[0]
        assert ((counts - 256) ** 2 / 256).sum() < 50  # chi-square, 15 degrees of freedom: p(> 50) = 1e-5
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.07
    assert uniforms([3, 9, -1], [7, 8, 9])[1] == uniforms([9], [8])[0]


def test_no_token_of_probability_zero_is_ever_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    for u in (0.0, np.nextafter(0.5, 0), 0.5, 1 - 2.0**-53):
        assert sample(logits, [Policy(1.0, 1.0, 0, None, 0)], np.array([u])).ids[0] in (1, 3)
