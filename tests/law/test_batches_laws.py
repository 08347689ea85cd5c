"""Law 4: task advantages."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batches.advantages import shuffled_rewards, task_advantages

REWARDS = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(st.tuples(st.sampled_from("abcd"), REWARDS), max_size=40))
def test_advantages_are_reward_minus_group_mean(samples: list[tuple[str, float]]) -> None:
    ids = [name for name, _ in samples]
    rewards = [reward for _, reward in samples]
    advantages, metrics = task_advantages(rewards, ids)
    assert metrics["num_groups"] == len(set(ids))
    for name in set(ids):
        mine = [i for i, other in enumerate(ids) if other == name]
        mean = math.fsum(rewards[i] for i in mine) / len(mine)
        scale = max(abs(rewards[i]) for i in mine)
        for i in mine:
            assert math.isfinite(advantages[i])
            assert advantages[i] == pytest.approx(rewards[i] - mean, abs=1e-12 * (1 + scale))


@given(REWARDS, st.integers(1, 20))
def test_equal_rewards_give_exactly_zero(reward: float, size: int) -> None:
    advantages, metrics = task_advantages([reward] * size, ["g"] * size)
    assert advantages == [0.0] * size
    assert metrics["num_equal_groups"] == 1
    assert metrics["num_single_groups"] == (size == 1)


@given(st.permutations(list(range(6))))
def test_groups_go_by_id_not_by_place(order: list[int]) -> None:
    rewards, ids = [1.0, 0.0, 0.0, 5.0, 5.0, 8.0], ["a", "a", "a", "b", "b", "b"]
    straight, _ = task_advantages(rewards, ids)
    mixed, _ = task_advantages([rewards[i] for i in order], [ids[i] for i in order])
    assert mixed == [straight[i] for i in order]


def test_a_difference_of_one_rounding_stays_that_small() -> None:
    advantages, _ = task_advantages([0.3, 0.1 + 0.2, 0.3], ["g"] * 3)
    assert max(map(abs, advantages)) < 1e-16


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match="group g is not finite"):
        task_advantages([bad, 0.0], ["g", "g"])


def test_rewards_whose_advantage_would_overflow_are_refused() -> None:
    with pytest.raises(ValueError, match="scale them down"):
        task_advantages([1.7e308, -1.7e308, -1.7e308], ["g"] * 3)


@given(st.lists(REWARDS, max_size=30), st.integers(0, 5), st.integers(0, 5))
def test_shuffled_rewards_are_the_same_ones_in_an_order_of_the_batch(rewards: list[float], seed: int, k: int) -> None:
    dealt = shuffled_rewards(rewards, seed=seed, index=k)
    assert sorted(dealt) == sorted(rewards)
    assert dealt == shuffled_rewards(rewards, seed=seed, index=k)


def test_shuffled_rewards_cross_groups_and_differ_between_batches() -> None:
    rewards = [float(i) for i in range(24)]
    orders = {tuple(shuffled_rewards(rewards, seed=0, index=k)) for k in range(8)}
    assert len(orders) == 8
    assert all(max(abs(a - b) for a, b in zip(order, rewards, strict=True)) >= 6 for order in orders)
