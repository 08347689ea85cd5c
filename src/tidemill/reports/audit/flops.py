"""Floating-point operations of a policy, from its `config.json` alone: two per weight that a token meets.

    forward per token = 2 · (projections + experts of the token + router + output head) + 4 · L · H · d · context
    training          = 3 × forward (forward, gradient by the inputs, gradient by the weights)

Left out: norms, rotations, softmaxes, the embedding's look-up, the optimizer's step (no matrix products in them).
"""

from typing import Any

from tidemill.reports.audit.forward import head_size

TRAINING_FACTOR = 3.0


def forward_flops_per_token(config: dict[str, Any], mean_context: float) -> float:
    """`mean_context`: keys that a query attends to, averaged over the positions, the position itself included."""
    hidden, size = config["hidden_size"], head_size(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * size * (2 * heads + 2 * kv_heads)
    dense_layers = set(config.get("mlp_only_layers") or ())
    if "num_experts" in config:
        experts = 3 * hidden * config["moe_intermediate_size"] * config["num_experts_per_tok"]
        sparse = experts + hidden * config["num_experts"]
    else:
        sparse, dense_layers = 0, set(range(config["num_hidden_layers"]))
    weights = config["vocab_size"] * hidden
    for layer in range(config["num_hidden_layers"]):
        weights += attention + (3 * hidden * config["intermediate_size"] if layer in dense_layers else sparse)
    return 2.0 * weights + 4.0 * config["num_hidden_layers"] * heads * size * mean_context
