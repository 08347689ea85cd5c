"""The demo: a policy of 3.8 million parameters learns to mend real functions, on two cores, in a quarter of an hour.

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
    policy=PolicyConfig(vocab_size=2048, hidden_size=192, num_layers=4, num_heads=6, num_kv_heads=3, expert_size=320),
    pretraining=PretrainingConfig(num_steps=400, tokens_per_step=2048),
    demonstrations=DemonstrationConfig(num_episodes=160, num_steps=60),
    rl=ReinforcementConfig(num_updates=24, group_size=8, groups_per_batch=6, max_age=2, kl_weight=0.002),
    rollouts=RolloutConfig(num_slots=16),
    evaluation=EvaluationConfig(every=24, num_tasks=40),
)
