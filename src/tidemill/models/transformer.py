"""The policy network: one transformer for the learner (`forward_packed`) and for the engine (`forward_cached`).

Legend of axes: T tokens (flat, several sequences one after another), D hidden, H heads, G key-value heads, C head
width, L layers, K experts per token, S slots, B rows that decode.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.core.errors import ModelError
from tidemill.core.records import ROUTE_SENTINEL
from tidemill.models.config import ModelConfig
from tidemill.models.experts import Routing, mix_experts, route
from tidemill.models.logprobs import token_logprobs

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_THC, k_TGC, v_TGC) -> [T, H·C]"""


class PackedOutput(NamedTuple):
    hidden_TD: Tensor
    """After the last norm: what the head takes."""
    routes_TLK: Tensor
    """int64: the expert ids that were used."""
    num_replaced: int
    """Over all layers: forced ids that were implausible and gave way to the router's own."""
    num_missing: int
    """Over all layers: rows whose forced route was `ROUTE_SENTINEL`."""


@final
class KVCache:
    """Keys and values of `num_slots` sequences of at most `context_tokens`. Rows that decode are rows 0..B−1."""

    def __init__(self, config: ModelConfig, num_slots: int, context_tokens: int) -> None:
        shape = (config.num_layers, num_slots, 2, config.num_kv_heads, context_tokens, config.head_dim)
        self.data = torch.zeros(shape)
        self.num_slots = num_slots
        self.context_tokens = context_tokens

    def swap_rows(self, a: int, b: int, num_tokens: int) -> None:
        """Exchange two rows, of which neither holds more than `num_tokens`."""
        rows_a, rows_b = self.data[:, a, :, :, :num_tokens], self.data[:, b, :, :, :num_tokens]
        kept = rows_a.clone()
        rows_a.copy_(rows_b)
        rows_b.copy_(kept)

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        self.data[:, target, :, :, :num_tokens] = self.data[:, source, :, :, :num_tokens]


class Span(NamedTuple):
    """A run of prompt positions of one row, inside the flat tokens of a step."""

    row: int
    start: int
    """First token in the flat axis."""
    position: int
    """Position of that token in its sequence; those before it are in the cache."""
    num_tokens: int


class Layer(nn.Module):
    """Attention, then experts. Projections are fused; `models.hf` splits them by name."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, c = config.hidden_size, config.head_dim
        self.config = config
        self.input_norm_D = nn.Parameter(torch.ones(d))
        self.qkv = nn.Parameter(torch.empty((config.num_heads + 2 * config.num_kv_heads) * c, d))
        self.q_norm_C = nn.Parameter(torch.ones(c))
        self.k_norm_C = nn.Parameter(torch.ones(c))
        self.out = nn.Parameter(torch.empty(d, config.num_heads * c))
        self.mlp_norm_D = nn.Parameter(torch.ones(d))
        self.router_ED = nn.Parameter(torch.empty(config.num_experts, d))
        self.gate_up_EHD = nn.Parameter(torch.empty(config.num_experts, 2 * config.expert_size, d))
        self.down_EFD = nn.Parameter(torch.empty(config.num_experts, config.expert_size, d))

    def forward(
        self,
        x_TD: Tensor,
        index: int,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
        *,
        forced_TK: Tensor | None,
        min_gate_share: float,
    ) -> tuple[Tensor, Routing]:
        config = self.config
        eps, h, g, c = config.rms_norm_eps, config.num_heads, config.num_kv_heads, config.head_dim
        d = config.hidden_size
        normed_TD = F.rms_norm(x_TD, (d,), self.input_norm_D, eps)
        qkv_TXC = F.linear(normed_TD, self.qkv).view(-1, h + 2 * g, c)
        # Queries and keys go through norm and rotation together: half the operations, which is what decoding waits for.
        scale_XC = torch.cat((self.q_norm_C.expand(h, c), self.k_norm_C.expand(g, c)))
        qk_TXC = F.rms_norm(qkv_TXC[:, : h + g], (c,), None, eps) * scale_XC
        cos_T1C, sin_T1C = rotary
        qk_TXC = torch.addcmul(qk_TXC * cos_T1C, qk_TXC.roll(c // 2, -1), sin_T1C)
        mixed = attend(index, qk_TXC[:, :h], qk_TXC[:, h:], qkv_TXC[:, h + g :])
        x_TD = x_TD + F.linear(mixed, self.out)
        normed_TD = F.rms_norm(x_TD, (d,), self.mlp_norm_D, eps)
        logits_TE = F.linear(normed_TD, self.router_ED)
        routing = route(logits_TE, config.experts_per_token, config.norm_topk_prob, forced_TK, min_gate_share)
        mixed_TD = mix_experts(normed_TD, self.gate_up_EHD, self.down_EFD, routing.ids_TK, routing.gates_TK)
        return x_TD + mixed_TD, routing


@final
class Transformer(nn.Module):
    """Parameters are float32 unless moved; make one with `init_model`, or from `models.hf`."""

    cos_PC: Tensor
    sin_PC: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_VD = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm_D = nn.Parameter(torch.ones(config.hidden_size))
        self.lm_head_VD: nn.Parameter | None = None
        if not config.tie_embeddings:
            self.lm_head_VD = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        cos_PC, sin_PC = _rotary_tables(config)
        self.register_buffer("cos_PC", cos_PC, persistent=False)
        self.register_buffer("sin_PC", sin_PC, persistent=False)

    @property
    def head_VD(self) -> Tensor:
        return self.embed_VD if self.lm_head_VD is None else self.lm_head_VD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return F.linear(hidden_TD, self.head_VD)

    def token_logprobs(
        self, hidden_ND: Tensor, targets_N: Tensor, temperature: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and the entropy of its distribution; see `models.logprobs`."""
        return token_logprobs(hidden_ND, self.head_VD, targets_N, temperature)

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        cu_seqlens: Sequence[int] | Tensor,
        routes_TLK: Tensor | None = None,
        min_gate_share: float = 0.0,
    ) -> PackedOutput:
        return self.forward_packed(tokens_T, positions_T, cu_seqlens, routes_TLK, min_gate_share)

    def forward_packed(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        cu_seqlens: Sequence[int] | Tensor,
        routes_TLK: Tensor | None = None,
        min_gate_share: float = 0.0,
    ) -> PackedOutput:
        """Several sequences on one flat axis, without padding; each attends to itself alone.

        `cu_seqlens` is [0, end of the first, …, T]. `routes_TLK` (any integer dtype) forces expert ids, with
        `ROUTE_SENTINEL` where none is known; ids whose gate falls below `min_gate_share` of the router's own k-th
        are replaced (see `models.experts.replay_routes`). Raises `ModelError` for ids or lengths that do not fit.
        """
        bounds = [int(end) for end in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
        self._check(tokens_T, positions_T, bounds, routes_TLK)
        pairs = list(pairwise(bounds))
        num_shared = self.config.num_heads // self.config.num_kv_heads

        def attend(_: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> Tensor:
            outs = []
            for start, end in pairs:
                q, k, v = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q_THC, k_TGC, v_TGC))
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_shared > 1)
                outs.append(out.squeeze(0).transpose(0, 1).flatten(1))
            return torch.cat(outs) if len(outs) > 1 else outs[0]

        return self._run(tokens_T, positions_T, attend, routes_TLK, min_gate_share)

    def forward_cached(
        self, tokens_T: Tensor, positions_T: Tensor, cache: KVCache, num_decoding: int, spans: Sequence[Span]
    ) -> tuple[Tensor, Tensor]:
        """One engine step: `num_decoding` single tokens of cache rows 0, 1, …, then spans of prompt positions.

        Writes keys and values of all of them, then attends; every earlier position of a row must be in the cache.
        Returns hidden [T, D] and expert ids [T, L, K] int64. Agrees with `forward_packed` to float tolerance.
        """
        rows_T = torch.cat([torch.arange(num_decoding), *(torch.full((s.num_tokens,), s.row) for s in spans)])
        decoding = _Decoding(positions_T[:num_decoding]) if num_decoding else None
        masks = [_causal_mask(s) for s in spans]

        def attend(layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> Tensor:
            data = cache.data[layer]  # [S, 2, G, P, C]
            data[rows_T, :, :, positions_T] = torch.stack((k_TGC, v_TGC), 1)
            outs = []
            if decoding is not None:
                outs.append(decoding.attend(q_THC[:num_decoding], data))
            for span, mask in zip(spans, masks, strict=True):
                q = q_THC[span.start : span.start + span.num_tokens].transpose(0, 1).unsqueeze(0)
                kv = data[span.row, :, :, : span.position + span.num_tokens].unsqueeze(1)
                out = F.scaled_dot_product_attention(
                    q, kv[0], kv[1], attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] > kv.shape[2]
                )
                outs.append(out.squeeze(0).transpose(0, 1).flatten(1))
            return torch.cat(outs) if len(outs) > 1 else outs[0]

        out = self._run(tokens_T, positions_T, attend, None, 0.0)
        return out.hidden_TD, out.routes_TLK

    def _run(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        routes_TLK: Tensor | None,
        min_gate_share: float,
    ) -> PackedOutput:
        rotary = (self.cos_PC[positions_T].unsqueeze(1), self.sin_PC[positions_T].unsqueeze(1))
        x_TD = F.embedding(tokens_T, self.embed_VD)
        routings: list[Routing] = []
        for index, layer in enumerate(self.layers):
            forced_TK = None if routes_TLK is None else routes_TLK[:, index]
            x_TD, routing = layer(x_TD, index, rotary, attend, forced_TK=forced_TK, min_gate_share=min_gate_share)
            routings.append(routing)
        return PackedOutput(
            hidden_TD=F.rms_norm(x_TD, (self.config.hidden_size,), self.norm_D, self.config.rms_norm_eps),
            routes_TLK=torch.stack([r.ids_TK for r in routings], 1),
            num_replaced=sum(r.num_replaced for r in routings),
            num_missing=sum(r.num_missing for r in routings),
        )

    def _check(self, tokens_T: Tensor, positions_T: Tensor, bounds: list[int], routes_TLK: Tensor | None) -> None:
        config, num_tokens = self.config, tokens_T.shape[0]
        if positions_T.shape != tokens_T.shape or num_tokens == 0:
            raise ModelError(f"{num_tokens} tokens with {positions_T.shape[0]} positions: give one each, at least one")
        if bounds[0] != 0 or bounds[-1] != num_tokens or any(a >= b for a, b in pairwise(bounds)):
            raise ModelError(f"sequence bounds {bounds} do not rise from 0 to the {num_tokens} tokens")
        if int(tokens_T.max()) >= config.vocab_size or int(tokens_T.min()) < 0:
            raise ModelError(f"token id {int(tokens_T.max())} is outside the vocabulary of {config.vocab_size}")
        if int(positions_T.max()) >= config.max_positions:
            raise ModelError(f"position {int(positions_T.max())}: the model has {config.max_positions}")
        if routes_TLK is None:
            return
        expected = (num_tokens, config.num_layers, config.experts_per_token)
        if tuple(routes_TLK.shape) != expected:
            raise ModelError(f"routes have shape {tuple(routes_TLK.shape)}; expected {expected}")
        if bool(((routes_TLK >= config.num_experts) & (routes_TLK != ROUTE_SENTINEL)).any() | (routes_TLK < 0).any()):
            raise ModelError(f"routes name an expert that is not among the {config.num_experts} of this model")


@final
class _Decoding:
    """Attention of one new token per row 0..B−1 of the cache, all rows in one call, without copying the cache."""

    def __init__(self, positions_B: Tensor) -> None:
        self.num_tokens = int(positions_B.max()) + 1
        beyond_BP = torch.arange(self.num_tokens).unsqueeze(0) > positions_B.unsqueeze(1)
        mask_BP = torch.zeros(beyond_BP.shape).masked_fill_(beyond_BP, float("-inf"))
        self.mask_B11P = mask_BP[:, None, None]

    def attend(self, q_BHC: Tensor, data: Tensor) -> Tensor:
        num_rows, _, width = q_BHC.shape
        kv = data[:num_rows, :, :, : self.num_tokens]
        # The queries that share a key-value head stand where query positions would.
        q = q_BHC.reshape(num_rows, data.shape[2], -1, width)
        out = F.scaled_dot_product_attention(q, kv[:, 0], kv[:, 1], attn_mask=self.mask_B11P)
        return out.reshape(num_rows, -1)


def _causal_mask(span: Span) -> Tensor | None:
    """None where the span starts the sequence; else what each of its tokens may see, [tokens, positions]."""
    if span.position == 0:
        return None
    end = span.position + span.num_tokens
    return torch.arange(end).unsqueeze(0) <= torch.arange(span.position, end).unsqueeze(1)


def _rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin for every position; the sine is negative in the first half, so that rotating is roll and multiply."""
    half = config.head_dim // 2
    rates_C = 1.0 / config.rope_theta ** (torch.arange(half, dtype=torch.float32) * 2 / config.head_dim)
    angles_PC = torch.outer(torch.arange(config.max_positions, dtype=torch.float32), rates_C)
    cos, sin = angles_PC.cos(), angles_PC.sin()
    return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)


def init_model(config: ModelConfig, seed: int, std: float = 0.02) -> Transformer:
    """A fresh policy, the same one for the same seed: normal weights, those that write to the residual stream smaller
    by sqrt(2 · layers) (GPT-2), norms one."""
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            leaf = name.rsplit(".", 1)[-1]
            if "norm" in leaf:
                continue
            scale = (2 * config.num_layers) ** -0.5 if leaf in ("out", "down_EFD") else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (std * scale))
    return model


def layers_of(model: Transformer) -> list[Layer]:
    return [cast(Layer, layer) for layer in model.layers]
