"""When attention learns to copy: `python benchmarks/copying.py [STEPS] [RATE] [SHORTEST] [LONGEST]`.

Trains a fresh policy of the quickstart's shape on random tokens that come twice, 1,024 tokens a step, and prints the
loss on the second time (nats a token) every 50 steps.
"""

import random
import sys
import time

import torch

from tidemill.run.config import DemonstrationConfig, EvaluationConfig, PolicyConfig, PretrainingConfig, Recipe
from tidemill.run.config import ReinforcementConfig as Rl
from tidemill.run.services.context import model_config
from tidemill.run.services.learner import learner_config
from tidemill.updates.corpus import Corpus, document
from tidemill.updates.learner import Learner

VOCABULARY = 2048
TOKENS_PER_STEP = 1024


def main() -> None:
    given = [float(value) for value in sys.argv[1:]]
    num_steps, rate, shortest, longest = (*given, *(300, 2e-3, 4, 10)[len(given) :])
    recipe = Recipe(
        name="copying",
        tasks="",
        policy=PolicyConfig(vocab_size=VOCABULARY, hidden_size=128, expert_size=256),
        pretraining=PretrainingConfig(num_steps=int(num_steps), peak_lr=rate),
        demonstrations=DemonstrationConfig(num_episodes=0, num_steps=0),
        rl=Rl(num_updates=1),
        evaluation=EvaluationConfig(every=1),
    )
    torch.set_num_threads(1)
    learner = Learner(learner_config(recipe), model_config(recipe.policy, VOCABULARY), 0)
    rng = random.Random(0)
    made = []
    for _ in range(int(num_steps * TOKENS_PER_STEP / (shortest + longest)) + 1):
        num = rng.randint(int(shortest), int(longest))
        ids = [rng.randrange(6, VOCABULARY) for _ in range(num)]
        made.append(document([1, *ids, 2, *ids], [0.0] * (num + 2) + [1.0] * num))
    corpus = Corpus(made, row_tokens=TOKENS_PER_STEP, seed=0, whole=True)
    start_s, losses = time.process_time(), []
    for step in range(1, int(num_steps) + 1):
        losses.append(learner.train_text(corpus.next_rows(1))["nll"])
        if step % 50 == 0:
            print(
                f"step {step:4}  {time.process_time() - start_s:5.0f} CPU-s  nll {sum(losses[-10:]) / 10:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
