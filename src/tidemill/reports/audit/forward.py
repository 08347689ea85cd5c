"""A forward pass of our own, in numpy: what the logprobs of sampled tokens ought to have been, in float64 tensors.

Written from the published architecture (Qwen3 and Qwen3-MoE: RMSNorm, per-head q/k norms, rotary positions, grouped
query heads, SwiGLU, a softmax router over the top k experts) and sharing nothing with the engine or the learner.

Legend of axes: T positions, D hidden, H query heads, K key/value heads, d head size, E experts, k experts per token,
V vocabulary.
"""

import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Tensors = dict[str, Floats]

_SAFETENSORS_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_SENTINEL = 0xFFFF
_KNOWN_TYPES = ("qwen3", "qwen3_moe")


def raw_tensors(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name → (dtype, shape, bytes) of a `.safetensors` file. Raises `ValueError` where it is cut off or malformed."""
    if len(data) < 8:
        raise ValueError("a safetensors file of less than 8 bytes")
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError as error:
        raise ValueError(f"the header of a safetensors file is damaged: {error}") from error
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        chunk = data[8 + length + start : 8 + length + end]
        if len(chunk) != end - start:
            raise ValueError(f"tensor {name} is cut off")
        tensors[name] = (entry["dtype"], tuple(entry["shape"]), chunk)
    return tensors


def float64_tensors(data: bytes) -> Tensors:
    """The tensors of a `.safetensors` file, widened without loss."""
    return widened(raw_tensors(data))


def widened(raw: dict[str, tuple[str, tuple[int, ...], bytes]]) -> Tensors:
    """Tensors of (dtype, shape, bytes) as float64, without loss. Raises `ValueError` for a dtype of no weights."""
    tensors: Tensors = {}
    for name, (dtype, shape, chunk) in raw.items():
        if dtype not in _SAFETENSORS_DTYPES:
            raise ValueError(f"tensor {name} has dtype {dtype}, which holds no floating-point weights")
        values = np.frombuffer(chunk, dtype=_SAFETENSORS_DTYPES[dtype])
        if dtype == "BF16":
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        tensors[name] = values.reshape(shape).astype(np.float64)
    return tensors


def check_config(config: dict[str, Any]) -> None:
    """Raises `ValueError` where `config.json` describes something that this pass does not compute."""
    if config.get("model_type") not in _KNOWN_TYPES:
        raise ValueError(f"model_type {config.get('model_type')!r}: this forward pass knows {', '.join(_KNOWN_TYPES)}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"rope_type {rope.get('rope_type')!r}: this forward pass knows the default one")
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window: this forward pass attends to everything")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r}: this forward pass knows silu")


def rope_theta(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    return float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))


def head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def forward(
    config: dict[str, Any], tensors: Tensors, token_ids: NDArray[np.integer[Any]], routes: NDArray[Any] | None = None
) -> tuple[Floats, dict[str, int]]:
    """Logits `[T, V]` of one sequence, and counts.

    `routes` `[T, L_moe, k]` forces the expert ids, layer by layer; gates are computed here. Rows with the sentinel
    fall back to this pass's own top k. `rerouted` counts positions × layers whose forced set differs from it.
    """
    check_config(config)
    eps = _eps(config)
    embedding_VD = tensors["model.embed_tokens.weight"]
    hidden_TD = embedding_VD[np.asarray(token_ids, dtype=np.int64)]
    cos_Td, sin_Td = _rotary(len(token_ids), head_size(config), rope_theta(config))
    rotary = (cos_Td.astype(embedding_VD.dtype), sin_Td.astype(embedding_VD.dtype))
    counts = {"routed": 0, "rerouted": 0}
    num_moe = 0
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        normed_TD = _rms_norm(hidden_TD, tensors[prefix + "input_layernorm.weight"], eps)
        hidden_TD = hidden_TD + _attention(config, tensors, prefix + "self_attn.", normed_TD, rotary)
        normed_TD = _rms_norm(hidden_TD, tensors[prefix + "post_attention_layernorm.weight"], eps)
        if prefix + "mlp.gate.weight" in tensors:
            forced_Tk = None if routes is None else np.asarray(routes[:, num_moe])
            mixed_TD, layer_counts = _experts(config, tensors, prefix + "mlp.", normed_TD, forced_Tk)
            hidden_TD = hidden_TD + mixed_TD
            counts = {key: counts[key] + layer_counts[key] for key in counts}
            num_moe += 1
        else:
            weights = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")]
            hidden_TD = hidden_TD + _swiglu(normed_TD, *weights)
    hidden_TD = _rms_norm(hidden_TD, tensors["model.norm.weight"], eps)
    head_VD = embedding_VD if config.get("tie_word_embeddings") else tensors["lm_head.weight"]
    return hidden_TD @ head_VD.T, counts


def logprob(logits_V: Floats, token_id: int, temperature: float, support_ids: NDArray[Any] | None = None) -> float:
    """Of one token under softmax(logits / temperature) over the support; a greedy choice counts at temperature 1.

    −inf where the token is outside of the support.
    """
    scaled = logits_V / (temperature if temperature > 0 else 1.0)
    if support_ids is not None:
        if token_id not in support_ids:
            return float("-inf")
        pool = scaled[np.asarray(support_ids, dtype=np.int64)]
    else:
        pool = scaled
    top = pool.max()
    return float(scaled[token_id] - top - np.log(np.exp(pool - top).sum()))


def _eps(config: dict[str, Any]) -> float:
    return float(config.get("rms_norm_eps", 1e-6))


def _rms_norm(values: Floats, weight: Floats, eps: float) -> Floats:
    return weight * values / np.sqrt(np.mean(values * values, axis=-1, keepdims=True) + eps)


def _rotary(num_positions: int, size: int, theta: float) -> tuple[Floats, Floats]:
    """Angles are rounded to float32 on purpose: every implementation of this family does so, and by a thousand radians
    that rounding is part of the function which was trained. All else is float64."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies = np.float32(1.0) / (np.float32(theta) ** exponents)
    angles = np.outer(np.arange(num_positions, dtype=np.float32), frequencies)
    angles = np.concatenate([angles, angles], axis=-1).astype(np.float64)
    return np.cos(angles), np.sin(angles)


def _rotate(values_HTd: Floats, cos_Td: Floats, sin_Td: Floats) -> Floats:
    half = values_HTd.shape[-1] // 2
    turned = np.concatenate([-values_HTd[..., half:], values_HTd[..., :half]], axis=-1)
    return values_HTd * cos_Td + turned * sin_Td


def _linear(tensors: Tensors, name: str, values: Floats) -> Floats:
    result = values @ tensors[name + ".weight"].T
    return result + tensors[name + ".bias"] if name + ".bias" in tensors else result


def _attention(
    config: dict[str, Any], tensors: Tensors, prefix: str, x_TD: Floats, rotary: tuple[Floats, Floats]
) -> Floats:
    eps = _eps(config)
    num_positions, size = len(x_TD), head_size(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shape = (num_positions, -1, size)
    q_HTd = _rms_norm(_linear(tensors, prefix + "q_proj", x_TD).reshape(shape), tensors[prefix + "q_norm.weight"], eps)
    k_KTd = _rms_norm(_linear(tensors, prefix + "k_proj", x_TD).reshape(shape), tensors[prefix + "k_norm.weight"], eps)
    v_KTd = _linear(tensors, prefix + "v_proj", x_TD).reshape(shape).transpose(1, 0, 2)
    q_HTd = _rotate(q_HTd.transpose(1, 0, 2), *rotary)
    k_KTd = _rotate(k_KTd.transpose(1, 0, 2), *rotary)
    k_HTd = np.repeat(k_KTd, heads // kv_heads, axis=0)
    v_HTd = np.repeat(v_KTd, heads // kv_heads, axis=0)
    scores_HTT = q_HTd @ k_HTd.transpose(0, 2, 1) / math.sqrt(size)
    scores_HTT[:, ~np.tri(num_positions, dtype=bool)] = -np.inf
    scores_HTT = np.exp(scores_HTT - scores_HTT.max(axis=-1, keepdims=True))
    mixed_HTd = (scores_HTT / scores_HTT.sum(axis=-1, keepdims=True)) @ v_HTd
    return _linear(tensors, prefix + "o_proj", mixed_HTd.transpose(1, 0, 2).reshape(num_positions, heads * size))


def _swiglu(x_TD: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    inner = x_TD @ gate.T
    return (inner / (1.0 + np.exp(-inner)) * (x_TD @ up.T)) @ down.T


def _expert_weights(tensors: Tensors, prefix: str, expert: int) -> tuple[Floats, Floats, Floats]:
    """Per-expert tensors, or the fused ones that newer versions of the layout use."""
    if prefix + "experts.gate_up_proj" in tensors:
        gate, up = np.split(tensors[prefix + "experts.gate_up_proj"][expert], 2, axis=0)
        return gate, up, tensors[prefix + "experts.down_proj"][expert]
    gate, up, down = (tensors[f"{prefix}experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return gate, up, down


def _experts(
    config: dict[str, Any], tensors: Tensors, prefix: str, x_TD: Floats, forced_Tk: NDArray[Any] | None
) -> tuple[Floats, dict[str, int]]:
    counts = {"routed": 0, "rerouted": 0}
    router_TE = x_TD @ tensors[prefix + "gate.weight"].T
    router_TE = np.exp(router_TE - router_TE.max(axis=-1, keepdims=True))
    gates_TE = router_TE / router_TE.sum(axis=-1, keepdims=True)
    own_Tk = np.argsort(-gates_TE, axis=-1, kind="stable")[:, : config["num_experts_per_tok"]]
    chosen_Tk = own_Tk
    if forced_Tk is not None:
        known_T = (forced_Tk != _SENTINEL).all(axis=-1)
        if forced_Tk.shape != own_Tk.shape:
            raise ValueError(f"routes of shape {forced_Tk.shape}, and the router chooses {own_Tk.shape}")
        if (forced_Tk[known_T] >= gates_TE.shape[1]).any():
            raise ValueError(f"a route names expert {forced_Tk[known_T].max()}, of {gates_TE.shape[1]}")
        chosen_Tk = np.where(known_T[:, None], forced_Tk.astype(np.int64), own_Tk)
        counts["routed"] = int(known_T.sum())
        differs_T = (np.sort(chosen_Tk, axis=-1) != np.sort(own_Tk, axis=-1)).any(axis=-1)
        counts["rerouted"] = int(differs_T.sum())
    weights_Tk = np.take_along_axis(gates_TE, chosen_Tk, axis=-1)
    if config.get("norm_topk_prob"):
        weights_Tk = weights_Tk / weights_Tk.sum(axis=-1, keepdims=True)
    result_TD = np.zeros_like(x_TD)
    for expert in range(gates_TE.shape[1]):
        rows, slots = np.nonzero(chosen_Tk == expert)
        if len(rows):
            out = _swiglu(x_TD[rows], *_expert_weights(tensors, prefix, expert))
            np.add.at(result_TD, rows, out * weights_Tk[rows, slots, None])
    return result_TD, counts
