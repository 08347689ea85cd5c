"""A base policy: pre-training alone, for longer than a demo may take; other recipes start from it (`start_from`).

Half an hour on a quiet core. No module that the tasks hold out is read, nor seen by the tokenizer. Then take version 0
out of the run:

    tidemill run recipes/base.py
    tidemill weights pull runs/base/store 0 -o policies/mend-2m
"""

from tidemill.run.config import (
    DemonstrationConfig,
    EvaluationConfig,
    PolicyConfig,
    PretrainingConfig,
    Recipe,
    ReinforcementConfig,
)

recipe = Recipe(
    name="base",
    tasks="../tasksets/mend-v1/manifest.json",
    policy=PolicyConfig(vocab_size=2048, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, expert_size=256),
    pretraining=PretrainingConfig(num_steps=8_000, num_copying_steps=260, tokens_per_step=1024),
    demonstrations=DemonstrationConfig(num_episodes=0, num_steps=0),
    rl=ReinforcementConfig(num_updates=0, group_size=2, groups_per_batch=1),
    evaluation=EvaluationConfig(every=1, num_tasks=1),
)
