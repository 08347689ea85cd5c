"""Each loss against worked figures and finite differences; shapes against their annotations."""

import inspect

import jaxtyping
import pytest
import torch
from beartype import beartype
from torch import Tensor

from tidemill.updates import losses
from tidemill.updates.losses import (
    behaviour_metrics,
    k1,
    k3,
    kl_advantages,
    next_token_loss,
    policy_gradient_loss,
    token_mean_loss,
    truncated_importance,
)

ALL = torch.ones(4, dtype=torch.bool)
SOME = torch.tensor([True, False, True, True])


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_policy_gradient_worked_example() -> None:
    logp = vector(-1.0, -2.0, -3.0, -4.0).requires_grad_()
    value, metrics = policy_gradient_loss(logp, vector(0.5, 9.0, -1.0, 0.25), SOME, num_attempts=2, constant=4.0)
    value.backward()
    assert value.item() == pytest.approx(-(0.5 * -1 + -1 * -3 + 0.25 * -4) / 8, rel=1e-15)
    assert logp.grad is not None
    assert logp.grad.tolist() == [-0.5 / 8, 0.0, 1 / 8, -0.25 / 8]
    assert metrics["num_loss_tokens"] == 3


def test_token_mean_divides_by_the_tokens_of_the_batch() -> None:
    """Four kept positions of a batch of ten: the denominator is the batch's, not the mask's."""
    value, _ = token_mean_loss(vector(-1, -1, -1, -1), vector(1, 1, 1, 1), ALL, num_tokens=10)
    assert value.item() == pytest.approx(0.4)


def test_next_token_loss_worked_example() -> None:
    value, metrics = next_token_loss(vector(-1, -2, -3, -4), vector(1, 1, 0.5, 2), SOME, total_weight=3.5)
    assert value.item() == pytest.approx((1 + 1.5 + 8) / 3.5)
    assert metrics == {"nll_sum": 8.0, "num_loss_tokens": 3.0}


def test_importance_weights_are_cut_above_only_and_carry_no_gradient() -> None:
    logp = vector(-1.0, -1.0, -1.0, -300.0).requires_grad_()
    weights, metrics = truncated_importance(logp, vector(-1.0, -5.0, -0.5, -1.0), ALL, cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, torch.tensor(-0.5).exp().item(), 0.0])
    assert not weights.requires_grad
    assert metrics["num_truncated"] == 1
    huge, _ = truncated_importance(vector(0.0), vector(-1e6), torch.tensor([True]), cap=2.0)
    assert huge.tolist() == [2.0]


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_denominator_that_is_not_above_zero_is_refused(value: float) -> None:
    x = vector(-1, -1, -1, -1)
    for call in (
        lambda: policy_gradient_loss(x, x, ALL, value, 1.0),
        lambda: policy_gradient_loss(x, x, ALL, 1, value),
        lambda: token_mean_loss(x, x, ALL, value),
        lambda: next_token_loss(x, x, ALL, value),
        lambda: truncated_importance(x, x, ALL, value),
    ):
        with pytest.raises(ValueError, match="give a number above 0"):
            call()


def test_a_micro_batch_without_trained_tokens_adds_nothing() -> None:
    nothing = torch.zeros(4, dtype=torch.bool)
    logp = vector(-1, -1, -1, -1).requires_grad_()
    value, metrics = policy_gradient_loss(logp, vector(1, 1, 1, 1), nothing, 3, 1.0)
    value.backward()
    assert value.item() == 0.0
    assert logp.grad is not None
    assert not bool(logp.grad.any())
    assert metrics["num_loss_tokens"] == 0
    assert set(behaviour_metrics(logp, logp, nothing).values()) == {0.0}


def test_gradients_agree_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    logp, behaviour, adv = (torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(3))
    logp.requires_grad_()
    for loss in (
        lambda x: next_token_loss(x, adv.abs(), SOME, 2.5)[0],
        lambda x: policy_gradient_loss(x, adv, SOME, 3, 7.0)[0],
        lambda x: token_mean_loss(x, adv, SOME, 11)[0],
        lambda x: k1(x, behaviour, SOME)[0].sum(),
        lambda x: k3(x, behaviour, SOME)[0].sum(),
        lambda x: k3(behaviour, x, SOME)[0].sum(),
    ):
        assert torch.autograd.gradcheck(loss, (logp,), eps=1e-6, atol=1e-8)
    # The weight of importance sampling is held still: the difference quotient must hold it still too.
    weights, _ = truncated_importance(logp, behaviour, SOME, 1.5)

    def weighted(x: Tensor) -> Tensor:
        return policy_gradient_loss(x, adv * weights, SOME, 3, 7.0)[0]

    assert torch.autograd.gradcheck(weighted, (logp,), eps=1e-6, atol=1e-8)
    fresh = logp.detach().clone().requires_grad_()
    policy_gradient_loss(fresh, adv * truncated_importance(fresh, behaviour, SOME, 1.5)[0], SOME, 3, 7.0)[0].backward()
    held = logp.detach().clone().requires_grad_()
    weighted(held).backward()
    assert fresh.grad is not None
    assert held.grad is not None
    assert torch.equal(fresh.grad, held.grad)


def test_kl_estimators_agree_with_the_divergence_in_expectation() -> None:
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = float((q.exp() * (q - p)).sum())
    mask = torch.ones(6, dtype=torch.bool)
    first, third = k1(q, p, mask)[0], k3(q, p, mask)[0]
    assert float((q.exp() * first).sum()) == pytest.approx(exact, rel=1e-12)
    assert float((q.exp() * third).sum()) == pytest.approx(exact, rel=1e-12)
    assert bool((third >= 0).all())
    assert bool((first < 0).any())


def test_extreme_log_ratios_stay_finite() -> None:
    low, high = torch.tensor([-2e4, 0.0]), torch.tensor([0.0, -2e4])
    mask = torch.tensor([True, True])
    for values in (k1(low, high, mask)[0], k3(low, high, mask)[0]):
        assert bool(values.isfinite().all())
    assert all(torch.tensor(v).isfinite() for v in behaviour_metrics(low, high, mask).values())


def test_kl_advantages_have_a_baseline_per_group_and_no_gradient() -> None:
    kl = vector(1.0, 5.0, 3.0, 7.0).requires_grad_()
    advantages, metrics = kl_advantages(kl, ["a", "b", "a", "b"], 0.5)
    assert advantages.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert not advantages.requires_grad
    assert metrics["kl_reference_per_attempt"] == 4.0
    with pytest.raises(ValueError, match="zip"):
        kl_advantages(kl, ["a"], 0.5)


def test_behaviour_metrics_worked_example() -> None:
    behaviour = torch.full((200,), -1.0, dtype=torch.float64)
    logp = behaviour.clone()
    logp[:3] += 1.0  # ratio e
    logp[3] -= 0.5
    mask = torch.ones(200, dtype=torch.bool)
    found = behaviour_metrics(logp, behaviour, mask)
    assert found["ratio_over_2_share"] == 3 / 200
    assert found["dlogp_p99"] == 1.0  # the 198th of 200
    assert found["dlogp_max"] == 1.0
    assert found["k1"] == pytest.approx(-(3 - 0.5) / 200)
    ratios = torch.tensor([torch.e] * 3 + [torch.e**-0.5] + [1.0] * 196, dtype=torch.float64)
    assert found["ess_share"] == pytest.approx(float(ratios.sum() ** 2 / (200 * (ratios**2).sum())))
    same = behaviour_metrics(behaviour, behaviour, mask)
    assert same["ess_share"] == 1.0
    assert same["k3"] == same["dlogp_p99"] == same["ratio_over_2_share"] == 0.0


def test_shapes_are_as_annotated() -> None:
    """Under a shape checker every function takes what it says, returns what it says, and refuses other shapes."""
    x, mask = vector(-1, -2, -3, -4), ALL
    calls = {
        next_token_loss: ((x, x.abs(), mask, 1.0), 1),
        policy_gradient_loss: ((x, x, mask, 2, 1.0), 1),
        token_mean_loss: ((x, x, mask, 4), 1),
        truncated_importance: ((x, x, mask, 2.0), 1),
        k1: ((x, x, mask), 1),
        k3: ((x, x, mask), 1),
        behaviour_metrics: ((x, x, mask), 1),
    }
    public = {f for name, f in inspect.getmembers(losses, inspect.isfunction) if f.__module__ == losses.__name__}
    assert {f for f in public if not f.__name__.startswith("_")} == {*calls, kl_advantages}
    for function, (arguments, other) in calls.items():
        checked = jaxtyping.jaxtyped(typechecker=beartype)(function)
        checked(*arguments)
        wrong = list(arguments)
        wrong[other] = vector(1, 2, 3)
        with pytest.raises(jaxtyping.TypeCheckError):
            checked(*wrong)
    checked = jaxtyping.jaxtyped(typechecker=beartype)(kl_advantages)
    checked(x, ["a"] * 4, 0.1)
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(mask, ["a"] * 4, 0.1)
