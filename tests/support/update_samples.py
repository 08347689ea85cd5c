"""A small policy and samples of it, for tests of the learner."""

from collections.abc import Sequence

import numpy as np
import torch

from tidemill.core.records import Array, Batch, BatchItem, Trajectory
from tidemill.models.config import ModelConfig
from tidemill.models.transformer import Transformer, init_model
from tidemill.updates.learner import LearnerConfig
from tidemill.updates.schedules import StageConfig

TINY = ModelConfig(
    vocab_size=48,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=4,
    experts_per_token=2,
    expert_size=16,
    max_positions=64,
)


def learner_config(**changes: object) -> LearnerConfig:
    stage = StageConfig(peak_lr=1e-2, num_steps=100)
    return LearnerConfig(**({"cpt": stage, "sft": stage, "rl": stage, "max_pack_tokens": 64} | changes))


def sharp_model(seed: int, dtype: torch.dtype = torch.float32) -> Transformer:
    """Fresh weights have all but uniform logits; these have an opinion, so that an error shows."""
    return init_model(TINY, seed, std=0.3).to(dtype)


def trajectory(
    attempt_id: str,
    seed: int,
    *,
    length: int = 12,
    segment: int = 0,
    num_prompt: int = 3,
    tail: int = 0,
    version: int = 0,
    routes: bool = False,
    temperature: float = 1.0,
) -> Trajectory:
    """Random ids; sampled after the prompt in runs, as in turns, with `tail` tokens that nobody sampled at the end."""
    rng = np.random.default_rng((seed, segment))
    mask = rng.random(length) < 0.7
    mask[:num_prompt] = False
    if length - tail > num_prompt:
        mask[num_prompt] = True
    mask[length - tail :] = False
    return Trajectory(
        attempt_id=attempt_id,
        segment=segment,
        token_ids=Array.of(rng.integers(0, TINY.vocab_size, length), "int32"),
        sampled_mask=Array.of(mask, "bool"),
        logprobs=Array.of(np.where(mask, rng.normal(-3, 1, length), np.nan), "float32"),
        versions=Array.of(np.where(mask, version, -1), "int32"),
        routes=Array.of(_routes(rng, length), "uint16") if routes else None,
        temperature=temperature,
    )


def _routes(rng: np.random.Generator, length: int) -> np.ndarray:
    scores = rng.random((length, TINY.num_layers, TINY.num_experts))
    routes = scores.argsort(-1)[..., : TINY.experts_per_token].astype(np.uint16)
    routes[-1] = 0xFFFF
    return routes


def group_batch(
    index: int, rewards: Sequence[float], *, group_size: int, oldest_version: int | None = None
) -> tuple[Batch, dict[str, list[Trajectory]]]:
    """A batch of whole groups with trajectories of different lengths, every third attempt in two segments."""
    items, trajectories = [], {}
    version = index if oldest_version is None else oldest_version
    for number, reward in enumerate(rewards):
        group = number // group_size
        members = rewards[group * group_size : (group + 1) * group_size]
        name = f"b{index}-g{group}-a{number % group_size}"
        items.append(
            BatchItem(
                attempt_id=name, group_id=f"b{index}-g{group}", task_id=f"task-{group}", episode="0" * 64,
                reward=reward, advantage=reward - sum(members) / len(members) if len(set(members)) > 1 else 0.0,
                oldest_version=version,
            )
        )  # fmt: skip
        seed = 1000 * index + number
        trajectories[name] = [
            trajectory(name, seed, length=8 + number % 7, segment=segment, version=version)
            for segment in range(2 if number % 3 == 0 else 1)
        ]
    return Batch(index=index, stage="rl", items=tuple(items), group_size=group_size), trajectories
