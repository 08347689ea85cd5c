"""Log-probabilities of given tokens, without a second [tokens, vocabulary] buffer.

Legend of axes: N rows, D hidden, V vocabulary, C rows of a chunk, R rows with a support, S ids of the widest support.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 20
"""Of one buffer of logits: about what stays in the second-level cache."""


def token_logprobs(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Natural log-probability of each target under softmax(hidden · headᵀ / temperature), and the entropy in nats.

    `temperature` is a number or one per row, [N]; 0 (greedy sampling) counts as 1, as the engines record it. The
    entropy carries no gradient. Rows go chunk by chunk; the backward pass keeps one log-softmax of [N, V].
    """
    temperature_N = torch.as_tensor(temperature, dtype=hidden_ND.dtype).expand(hidden_ND.shape[0])
    temperature_N = torch.where(temperature_N == 0, 1.0, temperature_N)
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or head_VD.requires_grad):
        apply = cast(Callable[..., tuple[Tensor, Tensor]], _TokenLogprobs.apply)
        return apply(hidden_ND, head_VD, targets_N, temperature_N)
    logprobs_N, entropy_N, _ = _forward(hidden_ND, head_VD, targets_N, temperature_N, keep=False)
    return logprobs_N, entropy_N


def support_logprobs(
    hidden_RD: Tensor, head_VD: Tensor, targets_R: Tensor, supports_RS: Tensor, temperature_R: Tensor
) -> tuple[Tensor, Tensor]:
    """As `token_logprobs`, under the distribution over a support alone: what top-p, top-k or a grammar left.

    hidden_RD; targets_R: int64, each among its row's support, which the caller has checked (`updates.packing`);
    supports_RS: int64 ids, −1 where a row has fewer; temperature_R: 0 counts as 1. The rest of the vocabulary is never
    looked at. Holds [R, S, D] at once: made for the tens of ids that a grammar leaves, not for thousands.
    """
    missing_RS = supports_RS < 0
    vectors_RSD = head_VD[supports_RS.clamp(min=0)]
    scale_R1 = torch.where(temperature_R == 0, 1.0, temperature_R).unsqueeze(1)
    logits_RS = torch.einsum("rd,rsd->rs", hidden_RD, vectors_RSD) / scale_R1
    log_softmax_RS = logits_RS.masked_fill(missing_RS, float("-inf")).log_softmax(-1)
    place_R = (supports_RS == targets_R.unsqueeze(1)).int().argmax(1)
    logprobs_R = log_softmax_RS.gather(1, place_R.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        entropy_R = -(log_softmax_RS.exp() * log_softmax_RS).nan_to_num_(nan=0.0).sum(-1)
    return logprobs_R, entropy_R


def _forward(
    hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, temperature_N: Tensor, *, keep: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    logprobs, entropies, kept = [], [], []
    for rows in _chunks(hidden_ND, head_VD):
        logits_CV = (hidden_ND[rows] @ head_VD.T).div_(temperature_N[rows].unsqueeze(1))
        log_softmax_CV = logits_CV.log_softmax(-1)
        logprobs.append(log_softmax_CV.gather(1, targets_N[rows].unsqueeze(1)).squeeze(1))
        entropies.append(-(log_softmax_CV.exp().mul_(log_softmax_CV)).nan_to_num_(nan=0.0).sum(-1))
        if keep:
            kept.append(log_softmax_CV)
    empty = hidden_ND.new_zeros(0)
    return torch.cat([empty, *logprobs]), torch.cat([empty, *entropies]), kept


def _chunks(hidden_ND: Tensor, head_VD: Tensor) -> list[slice]:
    num_rows = max(16, _CHUNK_BYTES // (head_VD.shape[0] * head_VD.element_size()))
    return [slice(start, start + num_rows) for start in range(0, hidden_ND.shape[0], num_rows)]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, temperature_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs_N, entropy_N, kept = _forward(hidden_ND, head_VD, targets_N, temperature_N, keep=True)
        ctx.save_for_backward(hidden_ND, head_VD, targets_N, temperature_N, *kept)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_N = grads[0]
        hidden_ND, head_VD, targets_N, temperature_N, *kept = ctx.saved_tensors
        grad_hidden_ND, grad_head_VD = torch.empty_like(hidden_ND), torch.zeros_like(head_VD)
        scaled_N = grad_N / temperature_N
        for rows, log_softmax_CV in zip(_chunks(hidden_ND, head_VD), kept, strict=True):
            scaled_C1 = scaled_N[rows].unsqueeze(1)
            grad_logits_CV = log_softmax_CV.exp().mul_(-scaled_C1)
            grad_logits_CV.scatter_add_(1, targets_N[rows].unsqueeze(1), scaled_C1)
            grad_hidden_ND[rows] = grad_logits_CV @ head_VD
            grad_head_VD.addmm_(grad_logits_CV.T, hidden_ND[rows])
        return grad_hidden_ND, grad_head_VD, None, None
