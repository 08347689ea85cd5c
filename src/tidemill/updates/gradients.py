"""From micro-batches to accumulated gradients and the figures of one update.

Legend of axes: T positions of a micro-batch, L layers, E experts, K experts per token.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidemill.models.logprobs import support_logprobs
from tidemill.models.transformer import Transformer
from tidemill.updates.losses import Metrics, behaviour_metrics
from tidemill.updates.packing import PackedBatch, only


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """What the policy says about a micro-batch. Values outside the mask are 0."""

    logprobs_T: Tensor
    entropy_T: Tensor
    expert_counts_LE: Tensor
    num_replaced: int
    """Replayed expert ids that were implausible and gave way to the router's own."""
    num_missing: int
    """Replayed rows, over all layers, that had no recorded route."""


Loss = Callable[[Forward, PackedBatch], tuple[Tensor, Metrics]]


class NotFinite(ValueError):
    """A loss or a gradient is NaN or infinite; the message names the samples."""


def forward(model: Transformer, packed: PackedBatch, min_gate_share: float) -> Forward:
    """Log-probabilities and entropies of the trained targets; the head is computed for those positions alone."""
    out = model.forward_packed(
        packed.tokens_T, packed.positions_T, packed.cu_seqlens, packed.routes_TLK, min_gate_share
    )
    rows_M = packed.mask_T.nonzero().squeeze(1)
    logprobs_M, entropy_M = _target_logprobs(model, out.hidden_TD[rows_M], packed, rows_M)
    zeros_T = out.hidden_TD.new_zeros(packed.num_tokens)
    num_experts = model.config.num_experts
    counts = [torch.bincount(ids_TK.flatten(), minlength=num_experts) for ids_TK in out.routes_TLK.unbind(1)]
    return Forward(
        logprobs_T=zeros_T.index_copy(0, rows_M, logprobs_M),
        entropy_T=zeros_T.index_copy(0, rows_M, entropy_M.to(zeros_T.dtype)).detach(),
        expert_counts_LE=torch.stack(counts),
        num_replaced=out.num_replaced,
        num_missing=out.num_missing,
    )


def _target_logprobs(
    model: Transformer, hidden_MD: Tensor, packed: PackedBatch, rows_M: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of the targets at `rows_M`, each under what could be sampled there."""
    targets_M, temperature_M = packed.targets_T[rows_M], packed.temperature_T[rows_M].to(hidden_MD.dtype)
    if packed.supports_TS is None:
        return model.token_logprobs(hidden_MD, targets_M, temperature_M)
    supports_MS = packed.supports_TS[rows_M]
    is_narrow_M = supports_MS[:, 0] >= 0
    narrow_N, free_N = is_narrow_M.nonzero().squeeze(1), (~is_narrow_M).nonzero().squeeze(1)
    under_support = support_logprobs(
        hidden_MD[narrow_N], model.head_VD, targets_M[narrow_N], supports_MS[narrow_N], temperature_M[narrow_N]
    )
    under_all = model.token_logprobs(hidden_MD[free_N], targets_M[free_N], temperature_M[free_N])
    order_M = torch.cat((narrow_N, free_N)).argsort()
    return (torch.cat((under_support[0], under_all[0]))[order_M], torch.cat((under_support[1], under_all[1]))[order_M])


class Tally:
    """Gathers the figures of an update over its micro-batches."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.num_tokens = 0
        self._sums: dict[str, float] = {}
        self._entropy = self._replaced = self._missing = 0.0
        self._counts: Tensor | None = None
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, packed: PackedBatch, seen: Forward, loss: float, sums: Metrics) -> None:
        self.loss += loss
        self.num_tokens += packed.num_tokens
        self._entropy += float(seen.entropy_T.double().sum())
        self._replaced += seen.num_replaced
        self._missing += seen.num_missing
        self._counts = seen.expert_counts_LE if self._counts is None else self._counts + seen.expert_counts_LE
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        mask_T = packed.mask_T
        self._kept.append((seen.logprobs_T.detach()[mask_T], packed.behaviour_T[mask_T], packed.versions_T[mask_T]))

    def metrics(self) -> Metrics:
        """`loss`, `entropy` (nats per trained token), `expert_load_max` (share of the busiest expert of any layer) and
        the sums that the loss reported."""
        num_trained = sum(len(kept[0]) for kept in self._kept)
        values = {
            "loss": self.loss,
            "entropy": self._entropy / max(num_trained, 1),
            "num_tokens": float(self.num_tokens),
            "num_loss_tokens": float(num_trained),
            **self._sums,
        }
        if self._counts is not None:
            shares_LE = self._counts / self._counts.sum(1, keepdim=True)
            values["expert_load_max"] = float(shares_LE.max())
            num_routed = int(self._counts.sum())
            values["routes_replaced_share"] = self._replaced / max(num_routed, 1)
            values["routes_missing_share"] = self._missing / max(self.num_tokens * len(self._counts), 1)
        return values

    def behaviour(self, learner_version: int) -> Metrics:
        """Against the policies that sampled: `behaviour_metrics`, and token ages in versions (p50, p99, largest)."""
        if not self._kept:
            return {}
        logprobs_M, behaviour_M, versions_M = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
        everywhere_M = torch.ones(len(logprobs_M), dtype=torch.bool)
        values = behaviour_metrics(logprobs_M, behaviour_M, everywhere_M)
        return values | quantiles("token_age", (learner_version - versions_M).tolist())


def quantiles(name: str, values: Iterable[float]) -> Metrics:
    """p50, p99 and maximum, each a value that occurs; nothing where there are no values."""
    array = np.asarray(list(values), np.float64)
    if not len(array):
        return {}
    p50, p99 = np.quantile(array, [0.5, 0.99], method="inverted_cdf")
    return {f"{name}_p50": float(p50), f"{name}_p99": float(p99), f"{name}_max": float(array.max())}


def accumulate(
    model: Transformer,
    packs: Iterable[PackedBatch],
    loss: Loss,
    tally: Tally,
    *,
    min_gate_share: float = 0.0,
    backward: bool = True,
) -> None:
    """Add the gradients of all micro-batches to the model's, and their figures to the tally.

    `backward=False` only looks: for samples whose gradient is zero by their advantage. Raises `NotFinite`.
    """
    for packed in packs:
        with torch.set_grad_enabled(backward):
            seen = forward(model, packed, min_gate_share)
            finite_T = seen.logprobs_T.detach().isfinite()
            if not bool(finite_T.all()):
                names = sorted({packed.owners[i] for i in packed.owner_T[~finite_T].tolist()})
                raise NotFinite(f"the policy gives {', '.join(names)} a log-probability that is not finite")
            value, sums = loss(seen, packed)
            if not bool(value.isfinite()):
                raise NotFinite(f"the loss of {', '.join(packed.owners)} is {float(value)}")
            if backward:
                value.backward()  # type: ignore[no-untyped-call]
        tally.add(packed, seen, float(value.detach()), sums)


def culprits(model: Transformer, packs: Iterable[PackedBatch], loss: Loss, *, min_gate_share: float) -> list[str]:
    """Owners whose gradient, each alone, is not finite. Leaves the model without gradients."""
    names = []
    for packed in packs:
        for owner in packed.owners:
            model.zero_grad(set_to_none=True)
            try:
                accumulate(model, [only(packed, owner)], loss, Tally(), min_gate_share=min_gate_share)
            except NotFinite:
                names.append(owner)
                continue
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if not all(bool(grad.isfinite().all()) for grad in grads):
                names.append(owner)
    model.zero_grad(set_to_none=True)
    return names
