"""How a token is drawn: temperature, then allowed ids, then top-k, then top-p; the log-probability is of what is left.

Legend of axes: B rows, V vocabulary, S ids of a support.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK64 = (1 << 64) - 1


class Policy(NamedTuple):
    """How one row is sampled."""

    temperature: float
    top_p: float
    top_k: int
    allowed_ids: Tensor | None
    """int64, sorted, without repeats."""
    seed: int

    @property
    def is_restricted(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.allowed_ids is not None


class Sampled(NamedTuple):
    ids: list[int]
    logprobs: list[float]
    """NaN or infinite where the logits were: the caller must look."""
    supports: list[list[int] | None]
    """Per row: the ids that could be drawn, where the policy restricts them."""


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per row, from the request's seed and the position of the token in its sequence alone.

    So a token depends on no neighbour in the batch, and a resumed generation draws what the first would have drawn.
    (splitmix64 of Steele, Lea and Flood 2014, twice.)
    """
    state = _splitmix64(np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64))
    state = _splitmix64(state + np.array(positions, dtype=np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def sample(logits_BV: Tensor, policies: Sequence[Policy], uniforms_B: NDArray[np.float64]) -> Sampled:
    """Draw one token per row by inverting the cumulative distribution; at temperature 0 take the likeliest.

    The log-probability is natural, under the distribution really drawn from: softmax(logits / temperature) over the
    row's support, or over the support at temperature 1 for a greedy row.
    """
    scales_B = torch.tensor([policy.temperature or 1.0 for policy in policies], dtype=logits_BV.dtype)
    log_probs_BV = (logits_BV / scales_B.unsqueeze(1)).log_softmax(-1)
    supports: list[list[int] | None] = [None] * len(policies)
    for row, policy in enumerate(policies):
        if policy.is_restricted:
            support_S, log_probs_S = _restrict(log_probs_BV[row], policy)
            log_probs_BV[row] = float("-inf")
            log_probs_BV[row, support_S] = log_probs_S
            supports[row] = support_S.tolist()
    cumulative_BV = log_probs_BV.double().exp_().cumsum(-1)
    # Below the last sum, so that the first larger entry exists and is one of positive probability.
    last_B = cumulative_BV[:, -1]
    wanted_B = torch.minimum(torch.from_numpy(uniforms_B) * last_B, torch.nextafter(last_B, torch.zeros_like(last_B)))
    ids_B = torch.searchsorted(cumulative_BV, wanted_B.unsqueeze(1), right=True).squeeze(1)
    if any(policy.temperature == 0 for policy in policies):
        greedy_B = torch.tensor([policy.temperature == 0 for policy in policies])
        ids_B = torch.where(greedy_B, log_probs_BV.argmax(-1), ids_B)
    # Only rows of NaN leave the vocabulary; their logprob is NaN, which the caller refuses.
    ids_B = ids_B.clamp_(max=log_probs_BV.shape[1] - 1)
    logprobs_B = log_probs_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1)
    return Sampled(ids_B.tolist(), logprobs_B.tolist(), supports)


def _restrict(log_probs_V: Tensor, policy: Policy) -> tuple[Tensor, Tensor]:
    """The support in rising order of id, and the renormalised log-probabilities of its members."""
    candidates = torch.arange(log_probs_V.shape[0]) if policy.allowed_ids is None else policy.allowed_ids
    falling = log_probs_V[candidates].argsort(descending=True, stable=True)
    if policy.top_k > 0:
        falling = falling[: policy.top_k]
    if policy.top_p < 1.0:
        probs = log_probs_V[candidates[falling]].double().softmax(-1)
        # The smallest set that reaches top_p (Holtzman et al. 2020): what lies before a member has not reached it.
        falling = falling[probs.cumsum(-1) - probs < policy.top_p]
    support_S = candidates[falling].sort().values
    return support_S, log_probs_V[support_S].log_softmax(-1)
