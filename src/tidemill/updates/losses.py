"""Losses, KL estimators and off-policy measures: pure functions of tensors and floats that return (value, metrics).

Legend of axes: T positions of a packed micro-batch (masked ones included), N attempts.

Every loss is a sum over masked positions divided by a number that belongs to the whole batch, never to a micro-batch or
a rank: so micro-batches add up, and the gradient is the same for any split (law 2). What stands at a masked position
changes nothing, NaN included (law 3): it is replaced before any arithmetic.

The seam for other objectives is a weight per token, without gradient, that multiplies the advantage, as
`truncated_importance` does: CISPO, IcePop and sequence masks are weights too.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Metrics = dict[str, float]

_MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: beyond it an estimate is meaningless, and must only stay finite."""


def next_token_loss(
    logprobs_T: Float[Tensor, " T"], weights_T: Float[Tensor, " T"], mask_T: Bool[Tensor, " T"], total_weight: float
) -> tuple[Float[Tensor, ""], Metrics]:
    """Weighted cross-entropy, for pre-training and demonstrations.

    L = −Σ_t w_t · log π(x_t) / W, with W the sum of weights over the whole batch.

    logprobs_T: nats, of the token that follows each position. weights_T: at least 0. Left out: label smoothing, z-loss.
    Raises `ValueError` where `total_weight` is not above 0.
    """
    _check_denominator("total_weight", total_weight)
    nll_T = -torch.where(mask_T, logprobs_T, 0.0)
    value = (nll_T * torch.where(mask_T, weights_T, 0.0)).sum() / total_weight
    return value, {"nll_sum": float(nll_T.detach().sum()), "num_loss_tokens": float(mask_T.sum())}


def policy_gradient_loss(
    logprobs_T: Float[Tensor, " T"],
    advantages_T: Float[Tensor, " T"],
    mask_T: Bool[Tensor, " T"],
    num_attempts: int,
    constant: float,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Policy gradient as published: no importance ratio, no clip, no division by a deviation or by a length.

    Composer 2 technical report (arXiv 2603.24477), section 4; Dr. GRPO (arXiv 2503.20783), equation 3:
    L = −Σ_t A_t · log π(x_t) / (num_attempts · constant), attempts counted over the whole batch, an attempt of
    several segments once. `constant` only sets the scale: about the sampled tokens of an attempt.

    advantages_T: no gradient flows into them. Left out: PPO's ratio and clip, an entropy bonus; overlong attempts are
    kept like all others. Raises `ValueError` where a denominator is not above 0.
    """
    _check_denominator("num_attempts", num_attempts)
    _check_denominator("constant", constant)
    return _weighted_sum(logprobs_T, advantages_T, mask_T, num_attempts * constant)


def token_mean_loss(
    logprobs_T: Float[Tensor, " T"],
    advantages_T: Float[Tensor, " T"],
    mask_T: Bool[Tensor, " T"],
    num_tokens: int,
) -> tuple[Float[Tensor, ""], Metrics]:
    """Policy gradient under a token mean, as in DAPO (arXiv 2503.14476), equation 8: L = −Σ_t A_t · log π(x_t) / M.

    num_tokens: M, the sampled tokens of the whole batch, over all ranks and micro-batches. Long attempts weigh more
    than short ones. Left out: DAPO's clip and overlong penalty. Raises `ValueError` where `num_tokens` is not above 0.
    """
    _check_denominator("num_tokens", num_tokens)
    return _weighted_sum(logprobs_T, advantages_T, mask_T, num_tokens)


def truncated_importance(
    logprobs_T: Float[Tensor, " T"], behaviour_T: Float[Tensor, " T"], mask_T: Bool[Tensor, " T"], cap: float
) -> tuple[Float[Tensor, " T"], Metrics]:
    """Truncated importance sampling (TIS): the weight w_t = min(π(x_t) / μ(x_t), cap), without gradient.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Espeholt et al. 2018
    (arXiv 1802.01561), the ρ of V-trace. behaviour_T: log μ, under the distribution really sampled from. Multiply
    the advantages by it. Left out: any lower bound. Raises `ValueError` where `cap` is not above 0.
    """
    _check_denominator("cap", cap)
    ratio_T = _log_ratio(logprobs_T.detach(), behaviour_T, mask_T).exp()
    weights_T = torch.where(mask_T, ratio_T.clamp(max=cap), 0.0)
    num = max(int(mask_T.sum()), 1)
    return weights_T, {
        "num_truncated": float((mask_T & (ratio_T > cap)).sum()),
        "weight_mean": float(weights_T.sum()) / num,
    }


def k1(
    sampler_T: Float[Tensor, " T"], other_T: Float[Tensor, " T"], mask_T: Bool[Tensor, " T"]
) -> tuple[Float[Tensor, " T"], Metrics]:
    """k1 = −log r with r = p/q: an unbiased estimate, per token, of KL(q‖p) from samples of q. May be negative.

    Schulman 2020, "Approximating KL divergence". sampler_T: log q; other_T: log p. 0 where masked. Differentiating
    it as an on-policy loss has an expected gradient of zero: put it, detached, into the reward (`kl_advantages`).
    """
    value_T = -_log_ratio(other_T, sampler_T, mask_T)
    return value_T, {"k1": _mean(value_T, mask_T)}


def k3(
    sampler_T: Float[Tensor, " T"], other_T: Float[Tensor, " T"], mask_T: Bool[Tensor, " T"]
) -> tuple[Float[Tensor, " T"], Metrics]:
    """k3 = (r − 1) − log r with r = p/q: an unbiased estimate of KL(q‖p), never negative, of a variance that explodes
    as q and p part. Schulman 2020. log r is cut at ±20, so that the figure stays finite. 0 where masked.
    """
    log_ratio_T = _log_ratio(other_T, sampler_T, mask_T).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    value_T = torch.expm1(log_ratio_T) - log_ratio_T
    return value_T, {"k3": _mean(value_T, mask_T)}


def kl_advantages(
    kl_N: Float[Tensor, " N"], group_ids: Sequence[str], weight: float
) -> tuple[Float[Tensor, " N"], Metrics]:
    """The KL term as a part of the reward, with a group baseline of its own: A_i = −weight · (K_i − mean of group(K)).

    Composer 2 technical report, section 4, regularises by k1; that it stands in the reward, detached, is our reading.
    kl_N: K_i, the sum of `k1(policy, reference)` over the sampled tokens of attempt i, from the learner's own
    logprobs. group_ids: [N]. Returns advantages [N], to be added to the task's. Left out: reward-to-go.
    Raises `ValueError` where lengths differ.
    """
    groups: dict[str, list[int]] = {}
    for index, (_, group_id) in enumerate(zip(kl_N, group_ids, strict=True)):
        groups.setdefault(group_id, []).append(index)
    kl_N = kl_N.detach()
    baseline_N = torch.zeros_like(kl_N)
    for members in groups.values():
        baseline_N[members] = kl_N[members].mean()
    mean = float(kl_N.mean()) if len(kl_N) else 0.0
    return -weight * (kl_N - baseline_N), {"kl_reference_per_attempt": mean}


def behaviour_metrics(
    logprobs_T: Float[Tensor, " T"], behaviour_T: Float[Tensor, " T"], mask_T: Bool[Tensor, " T"]
) -> Metrics:
    """How far the policy has gone from the one that sampled, over the masked positions; zeros where there are none.

    `k1`, `k3`: estimates of KL(μ‖π) in nats. `dlogp_p99`, `dlogp_max`: of |log π − log μ|. `ratio_over_2_share`:
    P(max(r, 1/r) > 2), the F(2) of R3 (arXiv 2510.11370). `ess_share`: (Σ r)² / (M · Σ r²), 1 when on-policy.
    """
    if not bool(mask_T.any()):
        return dict.fromkeys(("k1", "k3", "dlogp_p99", "dlogp_max", "ratio_over_2_share", "ess_share"), 0.0)
    _, first = k1(behaviour_T, logprobs_T, mask_T)
    _, third = k3(behaviour_T, logprobs_T, mask_T)
    log_ratio_M = _log_ratio(logprobs_T, behaviour_T, mask_T)[mask_T].double()
    gap_M = log_ratio_M.abs().sort().values
    ratio_M = log_ratio_M.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    num = len(gap_M)
    return {
        **first,
        **third,
        "dlogp_p99": float(gap_M[-(-99 * num // 100) - 1]),
        "dlogp_max": float(gap_M[-1]),
        "ratio_over_2_share": float((log_ratio_M.abs() > torch.log(torch.tensor(2.0, dtype=torch.float64))).sum())
        / num,
        "ess_share": float(ratio_M.sum() ** 2 / (num * (ratio_M**2).sum())),
    }


def _weighted_sum(
    logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor, denominator: float
) -> tuple[Tensor, Metrics]:
    weights_T = torch.where(mask_T, advantages_T.detach(), 0.0)
    value = -(weights_T * torch.where(mask_T, logprobs_T, 0.0)).sum() / denominator
    return value, {"num_loss_tokens": float(mask_T.sum())}


def _log_ratio(upper_T: Tensor, lower_T: Tensor, mask_T: Tensor) -> Tensor:
    return torch.where(mask_T, upper_T, 0.0) - torch.where(mask_T, lower_T, 0.0)


def _mean(values_T: Tensor, mask_T: Tensor) -> float:
    return float(values_T.detach().double().sum()) / max(int(mask_T.sum()), 1)


def _check_denominator(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} is {value}: a batch without it cannot be trained; give a number above 0")
