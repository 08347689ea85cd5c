"""The audit's forward pass against the embedded engine: the one place where the two ever meet."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from tidemill.core.records import Array
from tidemill.core.seams import GenerationRequest, Weights
from tidemill.deltas.store import weights_files
from tidemill.engines.batcher import EngineConfig
from tidemill.engines.embedded import EmbeddedEngine
from tidemill.models.config import ModelConfig
from tidemill.models.hf import weights_of
from tidemill.models.transformer import init_model
from tidemill.reports.audit.forward import float64_tensors, forward, logprob

CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=4,
    experts_per_token=2,
    expert_size=48,
    max_positions=512,
)


async def session(
    engine: EmbeddedEngine, seed: int, options: dict[str, Any]
) -> tuple[list[int], dict[int, float], dict[int, Any]]:
    """Three turns: ids of the segment, logprob by position, route by position."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, CONFIG.vocab_size, 40).tolist()
    logprobs: dict[int, float] = {}
    routes: dict[int, Any] = {}
    for turn in range(3):
        request = GenerationRequest(
            session=str(seed), prompt_ids=ids, max_tokens=12, stop_ids=[], seed=10 * seed + turn, **options
        )
        async for chunk in engine.generate(request):
            logprobs.update({len(ids) + i: value for i, value in enumerate(chunk.logprobs)})
            ids = ids + chunk.token_ids
            if chunk.kv_versions is not None:
                assert isinstance(chunk.routes, Array)
                for index, row in enumerate(chunk.routes.numpy()):
                    routes.setdefault(chunk.row_start + index, row)
        ids = ids + rng.integers(0, CONFIG.vocab_size, 15).tolist()
    return ids, logprobs, routes


@pytest.fixture(scope="module")
def weights() -> Weights:
    return weights_of(init_model(CONFIG, 5, std=0.1), {})


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 0.0}], ids=["1", "0.7", "greedy"])
def test_recorded_logprobs_are_those_of_the_published_weights(weights: Weights, options: dict[str, Any]) -> None:
    async def play() -> list[tuple[list[int], dict[int, float], dict[int, Any]]]:
        engine = EmbeddedEngine(EngineConfig(num_slots=4, context_tokens=512))
        engine.swap(0, weights)
        try:
            return await asyncio.gather(*(session(engine, seed, options) for seed in range(3)))
        finally:
            await engine.close()

    files = weights_files(weights)
    config, tensors = json.loads(files["config.json"]), float64_tensors(files["model.safetensors"])
    for ids, logprobs, routes in asyncio.run(play()):
        fed = max(logprobs)
        forced = np.stack([routes[position] for position in range(fed)])
        logits, counts = forward(config, tensors, np.array(ids[:fed]), forced)
        temperature = options.get("temperature", 1.0)
        gaps = [abs(logprob(logits[at - 1], ids[at], temperature) - value) for at, value in logprobs.items()]
        assert len(gaps) == 36
        assert max(gaps) <= 1e-5
        assert counts["rerouted"] == 0
