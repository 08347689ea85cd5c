"""The audit's own forward pass against the reference implementation of the architecture."""

import json
from pathlib import Path

import numpy as np
import pytest

from tidemill.reports.audit import forward

ATOL = 2e-5
"""The reference computes its norms and its router's softmax in float32, whatever it is asked for."""

CONFIG = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
    "mlp_only_layers": [1],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(**CONFIG, experts_implementation="eager")
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():  # initial weights are too small to route or to attend anywhere in particular
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    ids = torch.randint(0, CONFIG["vocab_size"], (1, 90))
    with torch.no_grad():
        logits = model.double()(ids).logits[0].numpy()
    return folder, ids[0].numpy(), logits


def load(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    return config, forward.float64_tensors((folder / "model.safetensors").read_bytes())


def test_equals_the_reference_implementation(reference) -> None:
    folder, ids, expected = reference
    config, tensors = load(folder)
    logits, _ = forward.forward(config, tensors, ids)
    assert np.std(expected) > 0.5, "logits of one value would prove nothing"
    np.testing.assert_allclose(logits, expected, atol=ATOL)


def test_own_routes_forced_change_nothing_and_others_do(reference) -> None:
    folder, ids, expected = reference
    config, tensors = load(folder)
    routes = np.zeros((len(ids), 2, 2), dtype=np.uint16)
    routes[:] = [3, 1]
    forced, counts = forward.forward(config, tensors, ids, routes)
    assert np.abs(forced - expected).max() > 1e-2
    assert counts["routed"] == 2 * len(ids)
    assert counts["rerouted"] > len(ids)
    routes[:] = 0xFFFF
    free, counts = forward.forward(config, tensors, ids, routes)
    np.testing.assert_allclose(free, expected, atol=ATOL)
    assert counts["rerouted"] == 0


def test_routes_outside_of_the_experts_are_refused(reference) -> None:
    folder, ids, _ = reference
    config, tensors = load(folder)
    with pytest.raises(ValueError, match="expert 7, of 5"):
        forward.forward(config, tensors, ids, np.full((len(ids), 2, 2), 7, dtype=np.uint16))


def test_fused_expert_tensors_are_read_too(reference) -> None:
    folder, ids, expected = reference
    config, tensors = load(folder)
    fused = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp."
        if prefix + "experts.gate_up_proj" in tensors:
            pytest.skip("the reference saves fused tensors already")
        parts = [[tensors[f"{prefix}experts.{e}.{n}_proj.weight"] for e in range(5)] for n in ("gate", "up", "down")]
        fused[prefix + "experts.gate_up_proj"] = np.concatenate([np.stack(parts[0]), np.stack(parts[1])], axis=1)
        fused[prefix + "experts.down_proj"] = np.stack(parts[2])
    logits, _ = forward.forward(config, fused, ids)
    np.testing.assert_allclose(logits, expected, atol=ATOL)


def test_logprob_applies_temperature_and_support() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    assert forward.logprob(logits, 1, 1.0) == pytest.approx(np.log(0.3))
    assert forward.logprob(logits, 1, 0.0) == pytest.approx(np.log(0.3))
    assert forward.logprob(logits, 1, 0.5) == pytest.approx(np.log(0.09 / 0.38))
    assert forward.logprob(logits, 1, 1.0, np.array([1, 2])) == pytest.approx(np.log(0.6))
    assert forward.logprob(logits, 0, 1.0, np.array([1, 2])) == -np.inf


def test_what_it_does_not_compute_is_refused() -> None:
    with pytest.raises(ValueError, match="llama"):
        forward.check_config({"model_type": "llama"})
    with pytest.raises(ValueError, match="rope_type"):
        forward.check_config({"model_type": "qwen3", "rope_parameters": {"rope_type": "yarn"}})


def test_a_cut_off_weight_file_is_refused() -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    data = len(header).to_bytes(8, "little") + header + b"\0" * 12
    with pytest.raises(ValueError, match="tensor a is cut off"):
        forward.raw_tensors(data)
