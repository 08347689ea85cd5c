"""Weights of a tiny policy that no training has touched, for synthetic runs."""

from typing import Any

import numpy as np

from tidemill.core.records import Array
from tidemill.core.seams import Weights, bfloat16_bits
from tidemill.text.tokenizer import Tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
}


def random_weights(tokenizer: Tokenizer, *, seed: int, version: int) -> Weights:
    """Random at version 0, moved a little by every later one."""
    config = CONFIG | {"vocab_size": tokenizer.vocab_size}
    hidden, heads, size, inner = 16, 2, 8, 12
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + "self_attn.q_proj.weight": (heads * size, hidden)}
        shapes |= {prefix + f"self_attn.{name}_proj.weight": (size, hidden) for name in "kv"}
        shapes |= {prefix + "self_attn.o_proj.weight": (hidden, heads * size)}
        shapes |= {prefix + f"self_attn.{name}_norm.weight": (size,) for name in "qk"}
        shapes |= {prefix + f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {prefix + "mlp.gate.weight": (4, hidden)}
        for expert in range(4):
            for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                shapes[prefix + f"mlp.experts.{expert}.{name}_proj.weight"] = shape
    shapes["model.norm.weight"] = (hidden,)
    base, step = np.random.default_rng(seed), np.random.default_rng([seed, version])
    tensors = {}
    for name, shape in shapes.items():
        values = base.normal(0.0, 0.4, shape) + (1.0 if "norm" in name else 0.0)
        values = values + version * 0.02 * step.normal(0.0, 1.0, shape)
        tensors[name] = Array.of(bfloat16_bits(values.astype(np.float32)), "uint16")
    return Weights(config=config, tokenizer=tokenizer.files(), tensors=tensors)
