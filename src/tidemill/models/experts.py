"""Mixture of experts: the router, router replay, and the experts themselves.

Legend of axes: T tokens (flat), D hidden, E experts, K experts per token, F inner width of an expert.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.core.records import ROUTE_SENTINEL

_DENSE_ROWS = 32
"""Up to this many rows, computing all experts beats grouping, where at least half of them are wanted anyway."""


class Routing(NamedTuple):
    ids_TK: Tensor
    """int64, by falling gate."""
    gates_TK: Tensor
    num_replaced: int
    """Forced ids that were implausible, or repeated, and gave way to the router's own choice."""
    num_missing: int
    """Rows that had no recorded route."""


def route(
    logits_TE: Tensor, num_chosen: int, norm_topk_prob: bool, forced_TK: Tensor | None, min_gate_share: float
) -> Routing:
    """Choose experts, or replay a recorded choice; gates always come from this router, so that it keeps its gradient.

    Router replay (R3; Composer 2 report, router replay with a plausibility filter): ids are forced, gates computed
    anew. Left out: replay of the gates themselves.
    """
    probs_TE = logits_TE.softmax(-1)
    if forced_TK is None:
        gates_TK, ids_TK = probs_TE.topk(num_chosen, dim=-1)
        num_replaced = num_missing = 0
    else:
        ids_TK, num_replaced, num_missing = replay_routes(probs_TE.detach(), forced_TK, min_gate_share)
        gates_TK = probs_TE.gather(1, ids_TK)
    if norm_topk_prob:
        gates_TK = gates_TK / gates_TK.sum(-1, keepdim=True)
    return Routing(ids_TK, gates_TK, num_replaced, num_missing)


def replay_routes(probs_TE: Tensor, forced_TK: Tensor, min_gate_share: float) -> tuple[Tensor, int, int]:
    """Ids to use for recorded ones, with the counts of replaced ids and of rows without a route.

    A forced id stays where its gate score is at least `min_gate_share` times the least score of the router's own
    top-k; what goes is replaced by the router's best experts that are not in the row yet. Rows of `ROUTE_SENTINEL`
    become the router's own top-k.
    """
    num_chosen = forced_TK.shape[1]
    known_TK = forced_TK != ROUTE_SENTINEL
    ids_TK = forced_TK.where(known_TK, 0).long()
    threshold_T1 = probs_TE.topk(num_chosen, dim=-1).values[:, -1:] * min_gate_share
    stays_TK = known_TK & (probs_TE.gather(1, ids_TK) >= threshold_T1)
    stays_TE = torch.zeros_like(probs_TE).scatter_reduce_(1, ids_TK, stays_TK.to(probs_TE.dtype), "amax")
    # A probability is at most 1, so that every id that stays comes before every one that does not.
    chosen_TK = (probs_TE + 2 * stays_TE).topk(num_chosen, dim=-1).indices
    num_missing = int((~known_TK).all(-1).sum())
    num_replaced = int(known_TK.sum()) - int(stays_TE.sum())
    return chosen_TK, num_replaced, num_missing


def mix_experts(x_TD: Tensor, gate_up_EHD: Tensor, down_EFD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """Sum over the chosen experts of gate × SwiGLU expert. H is 2F: the gate projection, then the up projection."""
    num_experts, num_chosen = gate_up_EHD.shape[0], ids_TK.shape[1]
    if x_TD.shape[0] <= _DENSE_ROWS and num_experts <= 2 * num_chosen:
        return _all_experts(x_TD, gate_up_EHD, down_EFD, ids_TK, gates_TK)
    return _grouped_experts(x_TD, gate_up_EHD, down_EFD, ids_TK, gates_TK)


def _all_experts(x_TD: Tensor, gate_up_EHD: Tensor, down_EFD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
    num_experts, double_width, hidden = gate_up_EHD.shape
    gates_TE = gates_TK.new_zeros(x_TD.shape[0], num_experts).scatter(1, ids_TK, gates_TK)
    both_TEH = F.linear(x_TD, gate_up_EHD.view(-1, hidden)).view(-1, num_experts, double_width)
    gate_TEF, up_TEF = both_TEH.chunk(2, dim=-1)
    inner_TEF = F.silu(gate_TEF) * up_TEF * gates_TE.unsqueeze(-1)
    return inner_TEF.flatten(1) @ down_EFD.view(-1, hidden)


def _grouped_experts(x_TD: Tensor, gate_up_EHD: Tensor, down_EFD: Tensor, ids_TK: Tensor, gates_TK: Tensor) -> Tensor:
    num_experts, num_chosen = gate_up_EHD.shape[0], ids_TK.shape[1]
    flat_A = ids_TK.reshape(-1)
    order_A = flat_A.argsort(stable=True)
    counts = torch.bincount(flat_A, minlength=num_experts).tolist()
    rows_A = order_A.div(num_chosen, rounding_mode="floor")
    groups = torch.split(x_TD.index_select(0, rows_A), counts)
    outs = []
    # unbind rather than indexing: one gradient for the whole stack instead of a full-sized one per expert.
    for group, gate_up_HD, down_FD in zip(groups, gate_up_EHD.unbind(), down_EFD.unbind(), strict=True):
        if group.shape[0] or group.requires_grad:
            gate, up = F.linear(group, gate_up_HD).chunk(2, dim=-1)
            outs.append((F.silu(gate) * up) @ down_FD)
    back_A = torch.empty_like(order_A)
    back_A[order_A] = torch.arange(order_A.shape[0])
    out_TKD = torch.cat(outs).index_select(0, back_A).view(-1, num_chosen, x_TD.shape[1])
    return torch.bmm(gates_TK.unsqueeze(1), out_TKD).squeeze(1)
