"""Weights in the Hugging Face layout: transformers computes the same, and nothing that does not fit is loaded."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tidemill.core.errors import ModelError
from tidemill.core.records import Array
from tidemill.core.seams import Weights, bfloat16_bits
from tidemill.models.config import ModelConfig, config_from_hf, config_to_hf
from tidemill.models.flops import flops_per_token, training_flops_per_token
from tidemill.models.hf import fill, load_folder, model_of, save_folder, weights_of
from tidemill.models.transformer import init_model

TINY = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=4,
    experts_per_token=2,
    expert_size=16,
    max_positions=64,
)


def tiny_weights(config: ModelConfig = TINY, seed: int = 0) -> Weights:
    return weights_of(init_model(config, seed, std=0.2), {"tokenizer.json": b"{}"})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_transformers_computes_the_same_logits(tmp_path: Path, tied: bool, norm_topk_prob: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = dataclasses.replace(TINY, tie_embeddings=tied, norm_topk_prob=norm_topk_prob, rope_theta=5000.0)
    weights = tiny_weights(config)
    save_folder(weights, tmp_path)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ours = model_of(weights)
    tokens = torch.randint(0, config.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = theirs(tokens.unsqueeze(0)).logits[0]
        found = ours.logits(ours.forward_packed(tokens, torch.arange(40), [0, 40]).hidden_TD)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_folder_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_folder(tiny_weights(), tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    back = load_folder(tmp_path / "theirs")
    assert config_from_hf(back.config) == TINY
    model_of(back)
    for name, array in tiny_weights().tensors.items():
        assert back.tensors[name].data == array.data, name


def test_round_trip_is_exact_and_bits_are_those_of_the_seam(tmp_path: Path) -> None:
    weights = tiny_weights()
    save_folder(weights, tmp_path)
    back = load_folder(tmp_path)
    assert back.tokenizer == weights.tokenizer and back.config == weights.config
    again = weights_of(model_of(back), back.tokenizer)
    assert {n: a.data for n, a in again.tensors.items()} == {n: a.data for n, a in weights.tensors.items()}
    embedding = init_model(TINY, 0, std=0.2).embed_VD.detach().numpy()
    assert np.array_equal(weights.tensors["model.embed_tokens.weight"].numpy(), bfloat16_bits(embedding))


def test_init_is_the_same_for_the_same_seed() -> None:
    first, again, other = tiny_weights(seed=3), tiny_weights(seed=3), tiny_weights(seed=4)
    assert msgspec.msgpack.encode(first) == msgspec.msgpack.encode(again)
    assert msgspec.msgpack.encode(first) != msgspec.msgpack.encode(other)
    assert sum(p.numel() for p in init_model(TINY, 0).parameters()) == TINY.num_parameters


def _with(weights: Weights, name: str, array: Array | None) -> Weights:
    tensors = {key: value for key, value in weights.tensors.items() if key != name}
    if array is not None:
        tensors[name] = array
    return msgspec.structs.replace(weights, tensors=tensors)


NAME = "model.layers.1.mlp.experts.2.up_proj.weight"
SHAPE = (TINY.expert_size, TINY.hidden_size)
DAMAGES: dict[str, tuple[str, Array | None]] = {
    "missing": (NAME, None),
    "extra": ("model.layers.9.extra", Array.of([1], "uint16")),
    "misshapen": (NAME, Array.of(np.zeros((SHAPE[0], SHAPE[1] + 1)), "uint16")),
    "transposed": (NAME, Array.of(np.zeros(SHAPE[::-1]), "uint16")),
    "NaN": (NAME, Array.of(np.full(SHAPE, 0x7FC0), "uint16")),
    "infinity": (NAME, Array.of(np.full(SHAPE, 0x7F80), "uint16")),
    "other dtype": (NAME, Array.of(np.zeros(SHAPE), "float32")),
    "cut off": (NAME, Array(data=b"\0" * 10, dtype="uint16", shape=SHAPE)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_tensor_that_does_not_fit_is_named_and_nothing_changes(damage: str) -> None:
    name, array = DAMAGES[damage]
    model = model_of(tiny_weights(seed=5))
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        fill(model, _with(tiny_weights(), name, array))
    assert msgspec.msgpack.encode(weights_of(model, {})) == msgspec.msgpack.encode(
        msgspec.structs.replace(tiny_weights(seed=5), tokenizer={})
    )


def test_a_model_with_nan_is_not_published() -> None:
    model = init_model(TINY, 0)
    with torch.no_grad():
        model.norm_D[3] = float("nan")
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        weights_of(model, {})


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_cut_off_file_gives_one_clear_line(tmp_path: Path, keep: int) -> None:
    save_folder(tiny_weights(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged") as caught:
        load_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_integer_tensors_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load_folder(tmp_path)
    save_folder(tiny_weights(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight has dtype"):
        load_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
        ({"num_experts_per_tok": 9}, "9 of 4 experts"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_other_models_are_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        config_from_hf(config_to_hf(TINY) | change)


def test_a_missing_key_is_named() -> None:
    config = config_to_hf(TINY)
    del config["num_experts_per_tok"]
    with pytest.raises(ModelError, match="num_experts_per_tok"):
        config_from_hf(config)


def test_flops_count_active_experts_only() -> None:
    more = dataclasses.replace(TINY, num_experts=8)
    router = 2 * TINY.hidden_size * 4 * TINY.num_layers
    assert flops_per_token(more, 0) - flops_per_token(TINY, 0) == router
    assert flops_per_token(TINY, 100) > flops_per_token(TINY, 0)
    assert training_flops_per_token(TINY, 10) == 3 * flops_per_token(TINY, 10)
    # Two operations per active parameter, norms aside, where there is no context.
    norms = TINY.num_layers * (2 * TINY.head_dim + 2 * TINY.hidden_size) + TINY.hidden_size
    assert flops_per_token(TINY, 0) == 2 * (TINY.num_active_parameters - norms)
