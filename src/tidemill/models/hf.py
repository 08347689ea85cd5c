"""Weights in the Hugging Face layout: folders, `Weights` records, and the transformer's fused parameters.

The names are those that transformers and vLLM read: one tensor per projection and expert. bfloat16 on disk and on
the wire; float32 in the transformer.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tidemill.core.errors import ModelError
from tidemill.core.records import Array
from tidemill.core.seams import Weights
from tidemill.models.config import ModelConfig, config_from_hf, config_to_hf
from tidemill.models.transformer import Transformer, layers_of

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def named_views(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, view of the parameter's data in Hugging Face's shape), in a fixed order.

    Views: what is copied into one changes the model. Any module with the same parameter shapes serves, so that
    masters, gradients or moments can be named in the same way.
    """
    config = model.config
    c, q_rows = config.head_dim, config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * c
    yield "model.embed_tokens.weight", model.embed_VD.detach()
    for index, layer in enumerate(layers_of(model)):
        prefix = f"model.layers.{index}"
        q, k, v = torch.split(layer.qkv.detach(), [q_rows, kv_rows, kv_rows])
        yield f"{prefix}.self_attn.q_proj.weight", q
        yield f"{prefix}.self_attn.k_proj.weight", k
        yield f"{prefix}.self_attn.v_proj.weight", v
        yield f"{prefix}.self_attn.o_proj.weight", layer.out.detach()
        yield f"{prefix}.self_attn.q_norm.weight", layer.q_norm_C.detach()
        yield f"{prefix}.self_attn.k_norm.weight", layer.k_norm_C.detach()
        yield f"{prefix}.input_layernorm.weight", layer.input_norm_D.detach()
        yield f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm_D.detach()
        yield f"{prefix}.mlp.gate.weight", layer.router_ED.detach()
        for expert in range(config.num_experts):
            gate, up = layer.gate_up_EHD.detach()[expert].chunk(2)
            yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", gate
            yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", up
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", layer.down_EFD.detach()[expert].T
    yield "model.norm.weight", model.norm_D.detach()
    if model.lm_head_VD is not None:
        yield "lm_head.weight", model.lm_head_VD.detach()


def weights_of(model: Transformer, tokenizer: Mapping[str, bytes]) -> Weights:
    """The bfloat16 image of a model. Raises `ModelError` naming a tensor that holds NaN or infinity."""
    tensors = {}
    for name, view in named_views(model):
        _refuse_not_finite(name, view)
        tensors[name] = _bits(view)
    return Weights(config=config_to_hf(model.config), tokenizer=dict(tokenizer), tensors=tensors)


def model_of(weights: Weights) -> Transformer:
    """A new float32 transformer. Raises `ModelError` naming the tensor that is missing, extra, misshapen or damaged."""
    model = Transformer(config_from_hf(weights.config))
    fill(model, weights)
    return model


def fill(model: Transformer, weights: Weights) -> None:
    """Copy weights into a model of the same shape. Checks all before it changes any; raises as `model_of`."""
    config = config_from_hf(weights.config)
    if config != model.config:
        raise ModelError(f"the weights are of another model: {_difference(model.config, config)}")
    views = dict(named_views(model))
    if missing := sorted(views.keys() - weights.tensors.keys()):
        raise ModelError(f"the weights lack tensor {missing[0]} ({len(missing)} missing in all)")
    extra = weights.tensors.keys() - views.keys()
    if model.lm_head_VD is None:
        # Some writers repeat the tied embedding; equal bits are no harm, other ones are another model.
        repeated = weights.tensors.get("lm_head.weight")
        if repeated is not None and repeated.data == weights.tensors["model.embed_tokens.weight"].data:
            extra -= {"lm_head.weight"}
    if extra:
        raise ModelError(f"the weights hold tensor {min(extra)}, which this model has not ({len(extra)} extra in all)")
    values = {}
    for name, view in views.items():
        array = weights.tensors[name]
        if tuple(array.shape) != tuple(view.shape):
            raise ModelError(f"tensor {name} has shape {tuple(array.shape)}; the model needs {tuple(view.shape)}")
        values[name] = _values(name, array)
        _refuse_not_finite(name, values[name])
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(values[name])


def load_folder(folder: Path) -> Weights:
    """Read a Hugging Face folder (one `model*.safetensors` or several); other float dtypes are rounded to bfloat16.

    Raises `ModelError`, one line that names the file. The tensors are checked by `model_of`.
    """
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{folder} holds no config.json: give a Hugging Face model folder") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object")
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no model*.safetensors")
    tensors: dict[str, Array] = {}
    for file in files:
        try:
            loaded = load_file(file)
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise ModelError(f"{file} is damaged or cut off: {' '.join(str(error).split())}; fetch it again") from None
        for name, tensor in loaded.items():
            if not tensor.dtype.is_floating_point:
                raise ModelError(f"{file}: tensor {name} has dtype {tensor.dtype}; only float checkpoints can be used")
            tensors[name] = _bits(tensor)
    tokenizer = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).exists()}
    return Weights(config=config, tokenizer=tokenizer, tensors=tensors)


def save_folder(weights: Weights, folder: Path) -> None:
    """Write `config.json`, `model.safetensors` and the tokenizer's files: what transformers and vLLM load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(weights.config, indent=2, sort_keys=True) + "\n")
    tensors = {name: _bfloat16(array) for name, array in weights.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, data in weights.tokenizer.items():
        (folder / name).write_bytes(data)


def _bits(values: Tensor) -> Array:
    bits = values.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return Array(data=bits.tobytes(), dtype="uint16", shape=tuple(bits.shape))


def _bfloat16(array: Array) -> Tensor:
    return torch.from_numpy(array.numpy().view("<i2").copy()).view(torch.bfloat16)


def _values(name: str, array: Array) -> Tensor:
    if array.dtype != "uint16":
        raise ModelError(f"tensor {name} has dtype {array.dtype}; expected uint16, the bit patterns of bfloat16")
    try:
        return _bfloat16(array).float()
    except ValueError as error:
        raise ModelError(f"tensor {name} is damaged: {error}") from None


def _refuse_not_finite(name: str, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise ModelError(f"tensor {name} holds NaN or infinity: go back to an earlier version")


def _difference(ours: ModelConfig, theirs: ModelConfig) -> str:
    name = next(name for name in vars(ours) if getattr(ours, name) != getattr(theirs, name))
    return f"{name} is {getattr(theirs, name)}, not {getattr(ours, name)}"
