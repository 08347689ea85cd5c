"""The demo: a policy of 2 million parameters is trained to mend real functions, on two cores, in a quarter hour.

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
    policy=PolicyConfig(vocab_size=2048, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, expert_size=256),
    pretraining=PretrainingConfig(num_steps=1200, tokens_per_step=1024),
    demonstrations=DemonstrationConfig(num_episodes=180, num_steps=150),
    rl=ReinforcementConfig(
        num_updates=22,
        group_size=6,
        groups_per_batch=8,
        max_age=2,
        peak_lr=1.5e-4,
        temperature=0.6,
        kl_weight=0.001,
    ),
    max_window_lines=20,
    rollouts=RolloutConfig(num_slots=16),
    evaluation=EvaluationConfig(every=22, num_tasks=40),
)
