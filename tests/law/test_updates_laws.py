"""Laws 2, 3, 4 and 8: one denominator, packed equals unpacked, no signal no gradient, published is trained."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.update_samples import TINY, group_batch, learner_config, sharp_model, trajectory
from tidemill.core.records import Array, Trajectory
from tidemill.core.seams import Weights, bfloat16_bits
from tidemill.models.hf import model_of, weights_of
from tidemill.models.transformer import Transformer
from tidemill.updates.gradients import Forward, Loss, Tally, accumulate, forward
from tidemill.updates.learner import Learner
from tidemill.updates.losses import (
    behaviour_metrics,
    k1,
    k3,
    next_token_loss,
    policy_gradient_loss,
    token_mean_loss,
    truncated_importance,
)
from tidemill.updates.packing import PackedBatch, pack

few = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
QUICK = settings(max_examples=50, deadline=None)


def gradient(model: Transformer, packs: Sequence[PackedBatch], loss: Loss) -> tuple[Tensor, float]:
    model.zero_grad(set_to_none=True)
    tally = Tally()
    accumulate(model, packs, loss, tally)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads]), tally.loss


def attempts_loss(num_attempts: int) -> Loss:
    def loss(seen: Forward, packed: PackedBatch) -> tuple[Tensor, dict[str, float]]:
        return policy_gradient_loss(seen.logprobs_T, packed.advantages_T, packed.mask_T, num_attempts, 16.0)

    return loss


def tokens_loss(num_tokens: int) -> Loss:
    def loss(seen: Forward, packed: PackedBatch) -> tuple[Tensor, dict[str, float]]:
        return token_mean_loss(seen.logprobs_T, packed.advantages_T, packed.mask_T, num_tokens)

    return loss


def weighted_loss(total: float) -> Loss:
    def loss(seen: Forward, packed: PackedBatch) -> tuple[Tensor, dict[str, float]]:
        return next_token_loss(seen.logprobs_T, packed.weights_T, packed.mask_T, total)

    return loss


def close(left: Tensor, right: Tensor, relative: float = 1e-10) -> bool:
    return float((left - right).norm()) <= relative * float(right.norm())


@st.composite
def attempts(draw: st.DrawFn) -> tuple[list[Trajectory], dict[str, float]]:
    num = draw(st.integers(2, 5))
    rows, advantages = [], {}
    for number in range(num):
        name = f"a{number}"
        advantages[name] = draw(st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0]))
        for segment in range(draw(st.integers(1, 2))):
            rows.append(
                trajectory(
                    name, draw(st.integers(0, 99)), segment=segment, length=draw(st.integers(5, 20)),
                    tail=draw(st.integers(0, 2)), routes=draw(st.booleans()),
                    temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
                )
            )  # fmt: skip
    return rows, advantages


@few
@given(attempts(), st.integers(20, 60), st.randoms(use_true_random=False))
def test_law_2_the_gradient_is_the_same_for_any_split(
    given_attempts: tuple[list[Trajectory], dict[str, float]], max_tokens: int, random: object
) -> None:
    rows, advantages = given_attempts
    model = sharp_model(0, torch.float64)
    num_tokens = sum(int(row.sampled_mask.numpy().sum()) for row in rows)
    together = pack(rows, advantages, max_tokens=10_000)
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    ranks = [shuffled[0::2], shuffled[1::2]]
    for loss in (attempts_loss(len(advantages)), tokens_loss(num_tokens), weighted_loss(float(num_tokens))):
        whole, value = gradient(model, together, loss)
        split, split_value = gradient(model, pack(shuffled, advantages, max_tokens=max_tokens), loss)
        alone, _ = gradient(model, pack(rows, advantages, max_tokens=20), loss)
        over_ranks = sum(gradient(model, pack(rank, advantages, max_tokens=40), loss)[0] for rank in ranks)
        assert isinstance(over_ranks, Tensor)
        assert close(split, whole)
        assert close(alone, whole)
        assert close(over_ranks, whole)
        assert abs(value - split_value) <= 1e-10 * max(1.0, abs(value))


def test_law_2_unequal_ranks_give_the_mean_over_all_tokens_not_the_mean_of_means() -> None:
    """Five tokens of +1 on one rank, one of −1 on the other: (5 − 1) / 6, where a mean of means would be 0."""
    for sizes in ([(5, 1.0), (1, -1.0)], [(5, 1.0), (1, -1.0), (0, 1.0)]):
        total = 0.0
        for size, advantage in sizes:
            logprobs = torch.ones(6, requires_grad=True, dtype=torch.float64)
            mask = torch.arange(6) < size
            value, _ = token_mean_loss(logprobs, torch.full((6,), advantage, dtype=torch.float64), mask, 6)
            value.backward()
            assert logprobs.grad is not None
            total += float(logprobs.grad.sum())
        assert abs(total + 4 / 6) < 1e-15


def test_law_2_an_attempt_of_five_segments_counts_once() -> None:
    """The denominator counts attempts: cutting one attempt into segments moves no other attempt's gradient."""
    model = sharp_model(0, torch.float64)
    other = trajectory("other", 1)
    segments = [trajectory("long", 7, segment=index) for index in range(5)]
    advantages = {"other": 1.0, "long": 0.0}
    apart, _ = gradient(model, pack([other], advantages, max_tokens=1000), attempts_loss(2))
    together, _ = gradient(model, pack([*segments, other], advantages, max_tokens=1000), attempts_loss(2))
    assert close(together, apart)


@few
@given(attempts())
def test_law_3_packed_equals_unpacked(given_attempts: tuple[list[Trajectory], dict[str, float]]) -> None:
    rows, advantages = given_attempts
    model = sharp_model(1, torch.float64)
    with torch.no_grad():
        together = forward(model, pack(rows, advantages, max_tokens=10_000)[0], 0.0)
        alone = [forward(model, one, 0.0) for row in rows for one in pack([row], advantages, max_tokens=10_000)]
    for name in ("logprobs_T", "entropy_T"):
        joined = torch.cat([getattr(one, name) for one in alone])
        assert torch.allclose(getattr(together, name), joined, rtol=1e-11, atol=1e-12)


def test_law_3_what_follows_the_last_sampled_token_and_what_fills_masked_places_changes_nothing() -> None:
    model = sharp_model(2, torch.float64)
    plain = trajectory("a", 3, length=14, tail=4)
    mask = plain.sampled_mask.numpy()
    odd_logprobs = np.where(mask, plain.logprobs.numpy(), np.float32(np.inf))
    tokens = plain.token_ids.numpy().copy()
    tokens[-4:] = 0
    odd = Trajectory(
        attempt_id="a", segment=0, token_ids=Array.of(tokens, "int32"), sampled_mask=plain.sampled_mask,
        logprobs=Array.of(odd_logprobs, "float32"), versions=Array.of(np.where(mask, 0, 77), "int32"),
        routes=None, temperature=1.0,
    )  # fmt: skip
    one, _ = gradient(model, pack([plain], {"a": 1.0}, max_tokens=100), attempts_loss(1))
    two, _ = gradient(model, pack([odd], {"a": 1.0}, max_tokens=100), attempts_loss(1))
    assert torch.equal(one, two)


LOSSES = {
    "next_token": lambda logp, behaviour, adv, mask: next_token_loss(logp, adv, mask, 3.0)[0],
    "policy_gradient": lambda logp, behaviour, adv, mask: policy_gradient_loss(logp, adv, mask, 2, 3.0)[0],
    "token_mean": lambda logp, behaviour, adv, mask: token_mean_loss(logp, adv, mask, 5)[0],
    "importance": lambda logp, behaviour, adv, mask: policy_gradient_loss(
        logp, adv * truncated_importance(logp, behaviour, mask, 2.0)[0], mask, 2, 3.0
    )[0],
    "k1": lambda logp, behaviour, adv, mask: k1(logp, behaviour, mask)[0].sum(),
    "k3": lambda logp, behaviour, adv, mask: k3(logp, behaviour, mask)[0].sum(),
}


@QUICK
@given(st.integers(0, 10_000), st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]))
def test_law_3_masked_positions_are_inert_whatever_they_hold(seed: int, filler: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logp, behaviour, adv = (torch.randn(9, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(9, generator=generator) < 0.5
    for name, loss in LOSSES.items():
        found = []
        for fill in (0.0, filler):
            filled = [torch.where(mask, x, fill) for x in (logp, behaviour, adv)]
            filled[0].requires_grad_()
            value = loss(*filled, mask)
            value.backward()
            grad = filled[0].grad
            assert grad is not None
            assert bool(grad.isfinite().all()), name
            assert not bool(grad[~mask].any()), name
            found.append((value.detach(), grad))
        assert torch.equal(found[0][0], found[1][0]), name
        assert torch.equal(found[0][1], found[1][1]), name
    clean = behaviour_metrics(*(torch.where(mask, x, 0.0) for x in (logp, behaviour)), mask)
    assert behaviour_metrics(*(torch.where(mask, x, filler) for x in (logp, behaviour)), mask) == clean


@few
@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=2, max_size=3), st.booleans())
def test_law_4_groups_of_equal_rewards_move_nothing(rewards: list[float], with_kl: bool) -> None:
    batch, trajectories = group_batch(0, [reward for reward in rewards for _ in range(3)], group_size=3)
    learner = Learner(learner_config(kl_weight=0.5 if with_kl else 0.0), TINY, 0)
    if with_kl:  # equal to the policy: every k1 is 0
        learner.hold_reference(learner.weights({}))
    before = {name: value.clone() for name, value in learner.master.masters.items()}
    metrics = learner.train_batch(batch, trajectories)
    assert metrics["grad_norm"] == 0.0
    assert metrics["equal_groups_share"] == 1.0
    assert metrics["num_loss_tokens"] > 0
    assert all(torch.equal(before[name], value) for name, value in learner.master.masters.items())
    assert learner.version == 1


@few
@given(st.permutations(range(6)))
def test_law_4_groups_go_by_their_ids_not_by_their_place(order: list[int]) -> None:
    """A batch whose attempts stand interleaved trains the same as one whose groups stand together."""
    batch, trajectories = group_batch(0, [1.0, 0.0, 0.0, 0.0, 1.0, 1.0], group_size=3)
    mixed = type(batch)(index=0, stage="rl", items=tuple(batch.items[i] for i in order), group_size=3)
    norms = []
    for one in (batch, mixed):
        learner = Learner(learner_config(kl_weight=0.1, max_pack_tokens=500), TINY, sharp_model_weights(0))
        learner.hold_reference(sharp_model_weights(9))
        norms.append(learner.train_batch(one, trajectories)["grad_norm"])
    assert abs(norms[0] - norms[1]) <= 1e-4 * norms[0]
    assert norms[0] > 0


def sharp_model_weights(seed: int) -> Weights:
    return weights_of(sharp_model(seed), {})


@few
@given(st.integers(0, 3), st.integers(1, 4))
def test_law_8_what_is_published_is_what_is_trained(seed: int, num_updates: int) -> None:
    learner = Learner(learner_config(), TINY, sharp_model_weights(seed))
    for index in range(num_updates):
        learner.train_batch(*group_batch(index, [1.0, 0.0, 0.0, 1.0], group_size=2))
    for name, image in learner.model.named_parameters():
        master = learner.master.masters[name].detach()
        bits = bfloat16_bits(master.numpy())
        upcast = (bits.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(image.detach().numpy(), upcast), name
        assert master.dtype == torch.float32
    engine = model_of(learner.weights({"tokenizer.json": b"{}"}))
    packed = pack([trajectory("a", 5, length=20)], {"a": 1.0}, max_tokens=100)[0]
    with torch.no_grad():
        assert torch.equal(forward(engine, packed, 0.0).logprobs_T, forward(learner.model, packed, 0.0).logprobs_T)


def test_law_8_the_gradient_is_taken_at_the_image_not_at_the_master() -> None:
    """A master moved inside its bfloat16 cell changes no gradient and no published bit."""
    batch, trajectories = group_batch(0, [1.0, 0.0], group_size=2)
    norms, published = [], []
    for nudge in (0.0, 2.0**-12):
        learner = Learner(learner_config(), TINY, sharp_model_weights(0))
        with torch.no_grad():
            for master in learner.master.masters.values():
                master.mul_(1 + nudge)
        learner.master.loaded()
        published.append(learner.weights({}).tensors)
        norms.append(learner.train_batch(batch, trajectories)["grad_norm"])
    assert norms[0] == norms[1]
    assert all(published[0][name].data == published[1][name].data for name in published[0])


def test_idle_attempts_are_looked_at_but_not_differentiated() -> None:
    """Attempts of advantage 0 enter the denominator and the figures as if they had gone through the backward pass."""
    batch, trajectories = group_batch(0, [1.0, 0.0, 0.5, 0.5], group_size=2)
    learner = Learner(learner_config(), TINY, sharp_model_weights(0))
    metrics = learner.train_batch(batch, trajectories)
    rows = [row for rows in trajectories.values() for row in rows]
    advantages = {item.attempt_id: item.advantage for item in batch.items}
    model = model_of(sharp_model_weights(0))
    loss = learner.config.loss_constant
    grads, value = gradient(
        model,
        pack(rows, advantages, max_tokens=500),
        lambda seen, packed: policy_gradient_loss(seen.logprobs_T, packed.advantages_T, packed.mask_T, 4, loss),
    )
    assert abs(metrics["grad_norm"] - float(grads.norm())) <= 1e-5 * float(grads.norm())
    assert abs(metrics["loss"] - value) <= 1e-5 * abs(value)
    assert metrics["num_loss_tokens"] == sum(int(row.sampled_mask.numpy().sum()) for row in rows)


def test_logprobs_are_under_the_temperature_that_was_sampled_at() -> None:
    """Each sequence of a pack at its own; greedy counts as 1, as the engines record it."""
    model = sharp_model(3, torch.float64)
    temperatures = (0.5, 1.0, 2.0, 0.0)
    rows = [trajectory(f"a{i}", 7, length=9, temperature=t) for i, t in enumerate(temperatures)]
    (packed,) = pack(rows, {f"a{i}": 1.0 for i in range(4)}, max_tokens=100)
    with torch.no_grad():
        found = forward(model, packed, 0.0).logprobs_T
        logits = model.logits(model.forward_packed(packed.tokens_T, packed.positions_T, packed.cu_seqlens).hidden_TD)
    for index, temperature in enumerate(temperatures):
        here = (packed.owner_T == index) & packed.mask_T
        expected = (logits[here] / (temperature or 1.0)).log_softmax(-1)
        expected = expected.gather(1, packed.targets_T[here].unsqueeze(1)).squeeze(1)
        assert torch.allclose(found[here], expected, rtol=1e-10)
