"""Task advantages: what an attempt earned beyond its group (law 4)."""

import math
import random
from collections.abc import Sequence


def task_advantages(rewards: Sequence[float], group_ids: Sequence[str]) -> tuple[list[float], dict[str, float]]:
    """Group-mean baseline: A_i = R_i − mean(R over the group of i).

    Composer 2 technical report (arXiv 2603.24477), section 4; Dr. GRPO (arXiv 2503.20783), equation 3. Left out on
    purpose: division by the group's standard deviation and any length normalisation.

    rewards: [N], finite. group_ids: [N]; attempts of a group need not be neighbours.
    Returns the advantages [N] and counts: `num_groups`, `num_equal_groups` (all rewards equal: advantages exactly 0.0)
    and `num_single_groups` (one attempt: no baseline to learn from, so 0.0; flagged here).
    Raises `ValueError` for a reward that is not finite, or so large that its advantage would not be.
    """
    groups: dict[str, list[int]] = {}
    for index, (reward, group_id) in enumerate(zip(rewards, group_ids, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} of group {group_id} is not finite: mend the environment that gave it")
        groups.setdefault(group_id, []).append(index)
    advantages = [0.0] * len(rewards)
    num_equal = num_single = 0
    for group_id, members in groups.items():
        num_single += len(members) == 1
        earned = [rewards[i] for i in members]
        if min(earned) == max(earned):
            num_equal += 1  # said apart: R − mean would leave a rounding residue, and a gradient from nothing
            continue
        mean = math.fsum(reward / len(earned) for reward in earned)
        for i in members:
            advantages[i] = rewards[i] - mean
            if not math.isfinite(advantages[i]):
                raise ValueError(f"rewards of group {group_id} reach {max(map(abs, earned))}: scale them down")
    metrics = {
        "num_groups": float(len(groups)),
        "num_equal_groups": float(num_equal),
        "num_single_groups": float(num_single),
    }
    return advantages, metrics


def shuffled_rewards(rewards: Sequence[float], *, seed: int, index: int) -> list[float]:
    """A control that must not learn: the rewards of a batch dealt out anew over all of its attempts, across groups.

    rewards: [N], in the order of the batch's items. seed: of the run. index: of the batch. The same arguments give the
    same permutation, so that a batch can be recomputed from its episodes.
    """
    dealt = list(rewards)
    random.Random(f"{seed}/{index}/rewards").shuffle(dealt)
    return dealt
