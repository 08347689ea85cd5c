"""Floating-point operations of a policy, for the run's ledger. Training costs three times the forward pass."""

from tidemill.models.config import ModelConfig


def flops_per_token(config: ModelConfig, context_tokens: float) -> float:
    """Forward pass of one token that attends to `context_tokens` positions; a multiply-add counts as two.

    Only the experts that are chosen count. Left out: norms, rotary positions, softmax, sampling (below 2 %).
    """
    d, attention_width = config.hidden_size, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    projections = 2 * d * (attention_width + 2 * kv_width) + 2 * attention_width * d
    attention = 2 * 2 * attention_width * context_tokens
    experts = config.experts_per_token * 2 * 3 * d * config.expert_size + 2 * d * config.num_experts
    head = 2 * d * config.vocab_size
    return config.num_layers * (projections + attention + experts) + head


def training_flops_per_token(config: ModelConfig, context_tokens: float) -> float:
    """Forward and backward: the gradient of the inputs and that of the weights cost one forward pass each."""
    return 3 * flops_per_token(config, context_tokens)
