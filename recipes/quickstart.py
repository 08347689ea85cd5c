"""The demo: a small policy, pre-trained on code, learns to mend real functions, on two cores, in a quarter hour.

What the Composer 2 report does not publish (learning rates, group size, batch, the weights of rewards) is ours.
"""

from tidemill.run.config import (
    DemonstrationConfig,
    EvaluationConfig,
    PolicyConfig,
    PretrainingConfig,
    Recipe,
    ReinforcementConfig,
    RolloutConfig,
)

recipe = Recipe(
    name="quickstart",
    tasks="../tasksets/mend-v1/manifest.json",
    start_from="../policies/mend-2m",  # made by recipes/base.py
    policy=PolicyConfig(vocab_size=2048, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, expert_size=256),
    pretraining=PretrainingConfig(num_steps=200, tokens_per_step=1024, peak_lr=5e-4, max_functions=1000),
    demonstrations=DemonstrationConfig(num_episodes=180, num_steps=60, peak_lr=5e-4),
    rl=ReinforcementConfig(
        num_updates=22,
        group_size=6,
        groups_per_batch=8,
        max_age=2,
        peak_lr=3e-4,
        temperature=1.0,
        constrained=True,
        kl_weight=0.001,
    ),
    max_window_lines=20,
    rollouts=RolloutConfig(num_slots=16),
    evaluation=EvaluationConfig(every=22, num_tasks=63),
)
