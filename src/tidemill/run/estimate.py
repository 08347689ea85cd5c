"""What a recipe will need, before it is run: from its shapes and from what a core of this machine computes now."""

import os
import time

from tidemill.models.flops import flops_per_token
from tidemill.run.config import Recipe
from tidemill.run.services.context import model_config

TOKENS_PER_EPISODE = 600
"""Typical of the mending tasks, observations included."""
SANDBOX_CPU_S = 0.46
"""Per episode, measured by benchmarks/episode_cost.py."""
MEBI = 1 << 20


def core_flops() -> float:
    """FLOP/s of one thread in a matrix product of the size that small policies have."""
    import torch

    torch.set_num_threads(1)
    left, right = torch.randn(1024, 160), torch.randn(160, 640)
    torch.mm(left, right)
    start, num = time.perf_counter(), 0
    while time.perf_counter() - start < 0.2:
        torch.mm(left, right)
        num += 1
    return num * 2 * 1024 * 160 * 640 / (time.perf_counter() - start)


def estimate_lines(recipe: Recipe) -> list[str]:
    """Parameters, memory, disk and time, with what they were reckoned from."""
    config = model_config(recipe.policy, recipe.policy.vocab_size)
    num = config.num_parameters
    # Small tensors reach about a third of what a large product does.
    rate = core_flops() / 3
    forward = flops_per_token(config, TOKENS_PER_EPISODE)
    rl = recipe.rl
    episodes = rl.num_updates * rl.group_size * rl.groups_per_batch
    cores = os.cpu_count() or 1
    text_s = 3 * forward * recipe.pretraining.num_steps * recipe.pretraining.tokens_per_step / rate
    text_s /= min(recipe.pretraining.num_threads, cores)
    rl_cpu_s = episodes * (TOKENS_PER_EPISODE * 4 * forward / rate + SANDBOX_CPU_S)
    rl_s = rl_cpu_s / min(cores, 2)
    learner_bytes = num * (4 * 4 + 2) + recipe.policy.vocab_size * 4096 * 4 * 3
    return [
        f"policy: {num / 1e6:.2f} M parameters, {config.num_active_parameters / 1e6:.2f} M active per token",
        f"episodes: {episodes} in {rl.num_updates} updates of {rl.group_size * rl.groups_per_batch}",
        f"memory: about {(learner_bytes + 6 * 400 * MEBI) / 2**30:.1f} GiB, of which five processes with torch or "
        "their sandboxes are the most",
        f"disk: about {((rl.num_updates + 1) * num * 2 + episodes * 30_000) / MEBI:.0f} MiB for weights and episodes",
        f"time on {cores} cores: about {text_s / 60:.0f} min of pre-training and {rl_s / 60:.0f} min of reinforcement "
        f"(one core does {rate / 1e9:.1f} GFLOP/s on small tensors now)",
    ]
