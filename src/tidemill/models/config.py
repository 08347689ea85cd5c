"""The shape of a policy, to and from Hugging Face's `config.json`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tidemill.core.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A causal transformer with RMSNorm, per-head q/k norm, RoPE, grouped queries and SwiGLU experts."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    """Inner width of one expert."""
    max_positions: int
    norm_topk_prob: bool = True
    """Gates of the chosen experts sum to one."""
    tie_embeddings: bool = True
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"model configuration: {name} is {value!r}; give a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model configuration: {self.num_heads} heads cannot share {self.num_kv_heads} key-value heads; "
                "make num_heads a multiple of num_kv_heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"model configuration: head_dim is {self.head_dim}; rotary positions need an even one")
        if not self.experts_per_token <= self.num_experts < 0xFFFF:
            raise ModelError(
                f"model configuration: {self.experts_per_token} of {self.num_experts} experts per token; give at most "
                "num_experts of them, and fewer than 65535 experts"
            )
        if not (self.rope_theta > 0 and self.rms_norm_eps > 0):
            raise ModelError("model configuration: rope_theta and rms_norm_eps must be above 0")

    @property
    def num_parameters(self) -> int:
        return self._count(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets."""
        return self._count(self.experts_per_token)

    def _count(self, experts: int) -> int:
        d, dh = self.hidden_size, self.head_dim
        attention = 2 * d * dh * (self.num_heads + self.num_kv_heads) + 2 * dh
        mlp = experts * 3 * d * self.expert_size + self.num_experts * d
        embeddings = self.vocab_size * d * (1 if self.tie_embeddings else 2)
        return self.num_layers * (attention + mlp + 2 * d) + embeddings + d


_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "experts_per_token",
    "expert_size",
    "max_positions",
)


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read a `config.json`. Raises `ModelError` naming the architecture, the missing key or the unsupported setting."""
    architectures = config.get("architectures") or [_ARCHITECTURE_OF_TYPE.get(str(config.get("model_type")), "")]
    architecture = architectures[0] or config.get("model_type", "none")
    reader = _READERS.get(architecture)
    if reader is None:
        raise ModelError(
            f"config.json describes {architecture!r}, which cannot be run yet; use one of {', '.join(sorted(_READERS))}"
        )
    try:
        return reader(config)
    except KeyError as error:
        raise ModelError(f"config.json of a {architecture} lacks {error.args[0]!r}") from None


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` that transformers and vLLM load: old and new spelling of the rotary base both."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.expert_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "initializer_range": 0.02,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.norm_topk_prob,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }


def _read_qwen3_moe(config: Mapping[str, Any]) -> ModelConfig:
    _refuse_other(config, "attention_bias", False)
    _refuse_other(config, "hidden_act", "silu")
    _refuse_other(config, "use_sliding_window", False)
    _refuse_other(config, "decoder_sparse_step", 1)
    if config.get("mlp_only_layers"):
        raise ModelError(f"config.json: mlp_only_layers is {config['mlp_only_layers']}; every layer must have experts")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise ModelError(f"config.json: rotary positions of type {kind!r} are not supported; only 'default' is")
    num_heads = config["num_attention_heads"]
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        num_experts=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_size=config["moe_intermediate_size"],
        max_positions=config["max_position_embeddings"],
        norm_topk_prob=config.get("norm_topk_prob", False),
        tie_embeddings=config.get("tie_word_embeddings", False),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
    )


def _refuse_other(config: Mapping[str, Any], key: str, supported: object) -> None:
    if config.get(key, supported) != supported:
        raise ModelError(f"config.json: {key} is {config[key]!r}; only {supported!r} is supported")


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], ModelConfig]]] = {"Qwen3MoeForCausalLM": _read_qwen3_moe}
_ARCHITECTURE_OF_TYPE: Final[Mapping[str, str]] = {"qwen3_moe": "Qwen3MoeForCausalLM"}
