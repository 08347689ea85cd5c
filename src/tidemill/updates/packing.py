"""Sequences of any length as micro-batches of flat rows: no padding, each sequence with positions of its own.

Legend of axes: T positions fed to the model in one micro-batch, L MoE layers, K experts per token.

Position t is fed `tokens_T[t]` and predicts `targets_T[t]`, the next token of the same sequence. What follows the last
trained token of a sequence is not fed: under causal attention it changes nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.core.records import ROUTE_SENTINEL, Trajectory
from tidemill.updates.corpus import Document


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch. Values at positions outside `mask_T` mean nothing and are never used."""

    tokens_T: Tensor
    """int64"""
    positions_T: Tensor
    """int64: from 0 in every sequence."""
    cu_seqlens: tuple[int, ...]
    """0, end of the first sequence, …, T."""
    targets_T: Tensor
    """int64"""
    mask_T: Tensor
    """bool: the target is trained."""
    weights_T: Tensor
    """float32: loss weight of the target; for pre-training and demonstrations."""
    advantages_T: Tensor
    """float32: of the attempt that the target belongs to."""
    behaviour_T: Tensor
    """float32: log-probability of the target when it was sampled; NaN outside the mask."""
    versions_T: Tensor
    """int64: policy version that sampled the target; −1 outside the mask."""
    temperature_T: Tensor
    """float32: at which the sequence was sampled; 0 for greedy."""
    owner_T: Tensor
    """int64: index in `owners`."""
    owners: tuple[str, ...]
    """Attempt ids (or names of text rows), for the sums per attempt and to name a sample in an error."""
    routes_TLK: Tensor | None
    """int32: expert ids to replay, `ROUTE_SENTINEL` where unknown; None where no sequence has any."""
    supports_TS: Tensor | None = None
    """int64: ids that the target could have been, −1 behind them; a row of −1 alone: any. None where all are free."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def num_trained(self) -> int:
        return int(self.mask_T.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class _Piece:
    """One sequence, already shifted: arrays of the length that is fed."""

    owner: str
    tokens: NDArray[Any]
    targets: NDArray[Any]
    mask: NDArray[np.bool_]
    weights: NDArray[Any]
    behaviour: NDArray[Any]
    versions: NDArray[Any]
    routes: NDArray[Any] | None
    advantage: float
    temperature: float
    supports: NDArray[Any] | None = None
    """[length, S], −1 behind the ids of a row."""


def pack(trajectories: Iterable[Trajectory], advantages: Mapping[str, float], *, max_tokens: int) -> list[PackedBatch]:
    """Micro-batches for RL, in the order given. Trajectories without a sampled token of their own are left out.

    advantages: by attempt id. Raises `ValueError` for a trajectory without an advantage, a sampled token without a
    finite logprob, arrays of different lengths, or a sequence longer than `max_tokens`.
    """
    pieces = []
    for trajectory in trajectories:
        if trajectory.attempt_id not in advantages:
            raise ValueError(f"attempt {trajectory.attempt_id} has no advantage: it is in no item of the batch")
        advantage = float(advantages[trajectory.attempt_id])
        if not np.isfinite(advantage):
            raise ValueError(f"attempt {trajectory.attempt_id} has advantage {advantage}")
        piece = _piece(trajectory, advantage=advantage, weight=1.0)
        if piece is None:
            continue
        if not np.isfinite(piece.behaviour[piece.mask]).all():
            raise ValueError(f"attempt {trajectory.attempt_id}: a sampled token has no finite logprob")
        pieces.append(piece)
    return _micro_batches(pieces, max_tokens)


def pack_demonstrations(
    trajectories: Iterable[Trajectory], weights: Mapping[str, float] | None = None, *, max_tokens: int
) -> list[PackedBatch]:
    """Micro-batches for supervised training on the sampled tokens. Logprobs are not used; routes are not replayed,
    since whoever demonstrated had none. weights: by attempt id, 1 for all where None. Raises `ValueError` as `pack`."""
    pieces = []
    for trajectory in trajectories:
        weight = 1.0 if weights is None else float(weights[trajectory.attempt_id])
        if not (np.isfinite(weight) and weight >= 0):
            raise ValueError(f"attempt {trajectory.attempt_id} has weight {weight}: give 0 or more")
        piece = _piece(trajectory, advantage=0.0, weight=weight, use_routes=False)
        if piece is not None:
            pieces.append(replace(piece, temperature=1.0, supports=None))
    return _micro_batches(pieces, max_tokens)


def pack_text(rows: Iterable[Sequence[Document]], *, max_tokens: int) -> list[PackedBatch]:
    """Micro-batches for pre-training: each piece of each row is a sequence of its own."""
    pieces = []
    for number, row in enumerate(rows):
        for entry in row:
            length = len(entry.tokens) - 1
            if length == 0:
                continue
            pieces.append(
                _Piece(
                    owner=f"text row {number}",
                    tokens=entry.tokens[:-1],
                    targets=entry.tokens[1:],
                    mask=entry.weights[1:] > 0,
                    weights=entry.weights[1:],
                    behaviour=np.full(length, np.nan),
                    versions=np.full(length, -1),
                    routes=None,
                    advantage=0.0,
                    temperature=1.0,
                )
            )
    return _micro_batches(pieces, max_tokens)


def only(packed: PackedBatch, owner: str) -> PackedBatch:
    """The sequences of one owner alone: to find out which sample is at fault."""
    number = packed.owners.index(owner)
    keep_T = packed.owner_T == number
    bounds = [0]
    for start, end in pairwise(packed.cu_seqlens):
        if bool(keep_T[start]):
            bounds.append(bounds[-1] + end - start)
    kept = {
        name: value[keep_T] for name, value in vars(packed).items() if isinstance(value, Tensor) and name != "owner_T"
    }
    return replace(
        packed,
        **kept,
        owner_T=torch.zeros(bounds[-1], dtype=torch.int64),
        owners=(owner,),
        cu_seqlens=tuple(bounds),
    )


def _piece(trajectory: Trajectory, *, advantage: float, weight: float, use_routes: bool = True) -> _Piece | None:
    """Shift by one and cut behind the last trained token; None where none is trained. Raises `ValueError`."""
    where = f"attempt {trajectory.attempt_id}, segment {trajectory.segment}"
    tokens = trajectory.token_ids.numpy()
    mask = trajectory.sampled_mask.numpy()
    arrays = {
        "sampled_mask": mask,
        "logprobs": trajectory.logprobs.numpy(),
        "versions": trajectory.versions.numpy(),
    }
    routes = trajectory.routes.numpy() if use_routes and trajectory.routes is not None else None
    if routes is not None:
        arrays["routes"] = routes
    for name, array in arrays.items():
        if len(array) != len(tokens):
            raise ValueError(f"{where}: {len(tokens)} tokens but {len(array)} {name}")
    if not mask.any():
        return None
    if mask[0]:
        raise ValueError(f"{where}: its first token is marked as sampled, but nothing precedes it")
    end = int(np.flatnonzero(mask)[-1]) + 1
    return _Piece(
        owner=trajectory.attempt_id,
        tokens=tokens[: end - 1],
        targets=tokens[1:end],
        mask=mask[1:end],
        weights=np.full(end - 1, weight),
        behaviour=arrays["logprobs"][1:end],
        versions=arrays["versions"][1:end],
        routes=None if routes is None else routes[: end - 1],
        advantage=advantage,
        temperature=trajectory.temperature,
        supports=_supports(trajectory, where, end),
    )


def _supports(trajectory: Trajectory, where: str, end: int) -> NDArray[Any] | None:
    """Of the targets 1 to `end` − 1. Raises `ValueError` for a sampled token outside of its support."""
    if trajectory.support_ids is None or trajectory.support_offsets is None:
        return None
    ids, offsets = trajectory.support_ids.numpy(), trajectory.support_offsets.numpy()
    tokens = trajectory.token_ids.numpy()
    if len(offsets) != len(tokens) + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
        raise ValueError(f"{where}: the offsets of its supports do not fit {len(tokens)} tokens and {len(ids)} ids")
    widths = np.diff(offsets)[1:end]
    padded = np.full((end - 1, max(int(widths.max(initial=0)), 1)), -1, np.int64)
    column = np.arange(padded.shape[1])
    padded[column < widths[:, None]] = ids[offsets[1] : offsets[end]]
    outside = (widths > 0) & ~(padded == tokens[1:end, None]).any(1)
    if outside.any():
        raise ValueError(f"{where}: token {int(np.flatnonzero(outside)[0]) + 1} is outside of its support")
    return padded


def _micro_batches(pieces: Sequence[_Piece], max_tokens: int) -> list[PackedBatch]:
    """Fill micro-batches in order, at most `max_tokens` positions each."""
    batches: list[PackedBatch] = []
    held: list[_Piece] = []
    num_held = 0
    for piece in pieces:
        length = len(piece.tokens)
        if length > max_tokens:
            raise ValueError(
                f"{piece.owner}: a sequence of {length} tokens does not fit a micro-batch of {max_tokens}; "
                "raise max_pack_tokens to the longest context of the tasks"
            )
        if num_held + length > max_tokens:
            batches.append(_collate(held))
            held, num_held = [], 0
        held.append(piece)
        num_held += length
    if held:
        batches.append(_collate(held))
    return batches


def _collate(pieces: Sequence[_Piece]) -> PackedBatch:
    lengths = [len(piece.tokens) for piece in pieces]
    owners = tuple(dict.fromkeys(piece.owner for piece in pieces))
    index = {owner: number for number, owner in enumerate(owners)}

    def whole(name: str, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.concatenate([getattr(piece, name) for piece in pieces]).copy()).to(dtype)

    def each(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=dtype), torch.tensor(lengths))

    return PackedBatch(
        tokens_T=whole("tokens", torch.int64),
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=(0, *np.cumsum(lengths).tolist()),
        targets_T=whole("targets", torch.int64),
        mask_T=whole("mask", torch.bool),
        weights_T=whole("weights", torch.float32),
        advantages_T=each([piece.advantage for piece in pieces], torch.float32),
        behaviour_T=whole("behaviour", torch.float32),
        versions_T=whole("versions", torch.int64),
        temperature_T=each([piece.temperature for piece in pieces], torch.float32),
        owner_T=each([index[piece.owner] for piece in pieces], torch.int64),
        owners=owners,
        routes_TLK=_routes(pieces),
        supports_TS=_padded_supports(pieces),
    )


def _padded_supports(pieces: Sequence[_Piece]) -> Tensor | None:
    width = max((piece.supports.shape[1] for piece in pieces if piece.supports is not None), default=0)
    if width == 0:
        return None
    rows = np.full((sum(len(piece.tokens) for piece in pieces), width), -1, np.int64)
    start = 0
    for piece in pieces:
        if piece.supports is not None:
            rows[start : start + len(piece.tokens), : piece.supports.shape[1]] = piece.supports
        start += len(piece.tokens)
    return torch.from_numpy(rows)


def _routes(pieces: Sequence[_Piece]) -> Tensor | None:
    shapes = {piece.routes.shape[1:] for piece in pieces if piece.routes is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"routes of shapes {sorted(shapes)} in one batch: they come from different models")
    shape = shapes.pop()
    rows = [
        np.full((len(piece.tokens), *shape), ROUTE_SENTINEL, np.int32) if piece.routes is None else piece.routes
        for piece in pieces
    ]
    return torch.as_tensor(np.concatenate(rows).astype(np.int32))
