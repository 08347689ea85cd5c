"""Master weights: small updates add up, clipping is global, nothing moves on a bad gradient."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tidemill.updates.master import MasterWeights
from tidemill.updates.schedules import StageConfig, learning_rate

SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.0, "max_grad_norm": 1e9}


def linear(value: float = 1.0) -> nn.Linear:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def give(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def test_a_thousand_updates_too_small_for_bfloat16_add_up() -> None:
    """At 1.0 a bfloat16 step is 2^-7; each update moves by 1e-5, which a bfloat16 weight would never notice."""
    model = linear(1.0)
    master = MasterWeights(model, betas=(0.9, 0.95))
    moved = []
    for _ in range(1000):
        give(model, 1.0)
        moved.append(master.step(**(SETTINGS | {"learning_rate": 1e-5}))["changed_share"])
    assert master.masters["weight"].mean().item() == pytest.approx(1.0 - 0.01, abs=2e-5)
    assert model.weight[0, 0].item() == pytest.approx(0.99, abs=2**-8)
    assert model.weight[0, 0].item() < 1.0
    assert moved.count(0.0) > 990
    assert sum(moved) >= 2.0  # all weights, a few times


def test_a_step_is_that_of_adamw_on_the_master() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    plain = nn.Parameter(model.weight.detach().clone())
    optimizer = torch.optim.AdamW([plain], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    master = MasterWeights(model, betas=(0.9, 0.95))
    for index in range(5):
        give(model, 0.0)
        grad = torch.randn(4, 5, generator=torch.Generator().manual_seed(index))
        model.weight.grad, plain.grad = grad.clone(), grad.clone()
        master.step(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1e9)
        optimizer.step()
        assert torch.equal(master.masters["weight"], plain)
        assert torch.equal(model.weight, plain.to(torch.bfloat16).float())


def test_weight_decay_spares_vectors() -> None:
    model = linear(1.0)
    master = MasterWeights(model, betas=(0.9, 0.95))
    give(model, 0.0)
    master.step(learning_rate=0.1, weight_decay=0.5, max_grad_norm=1.0)
    assert master.masters["weight"].mean().item() == pytest.approx(0.95)
    assert master.masters["bias"].tolist() == [1.0, 1.0]


def test_clipping_is_by_the_norm_of_all_gradients_together() -> None:
    """Adam forgets a common factor: what clipping does shows in the second of two steps."""

    def after(max_grad_norm: float, scale: float) -> torch.Tensor:
        model = linear(0.0)
        master = MasterWeights(model, betas=(0.9, 0.95))
        norms = []
        for value in (1.0, scale):
            give(model, value)
            norms.append(master.step(**(SETTINGS | {"max_grad_norm": max_grad_norm}))["grad_norm"])
        assert norms == pytest.approx([8**0.5, scale * 8**0.5])  # 6 weights and 2 biases; as before clipping
        return master.masters["weight"].detach()

    assert torch.allclose(after(8**0.5, 100.0), after(1e9, 1.0), rtol=1e-5)
    assert not torch.allclose(after(1e9, 100.0), after(1e9, 1.0), rtol=1e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = linear(1.0)
    master = MasterWeights(model, betas=(0.9, 0.95))
    give(model, 1.0)
    master.step(**SETTINGS)
    before = {name: tensor.clone() for name, tensor in master.state().items()}
    give(model, 1.0)
    assert model.weight.grad is not None
    model.weight.grad[1, 2] = bad
    with pytest.raises(ValueError, match="norm is"):
        master.step(**SETTINGS)
    assert all(torch.equal(before[name], tensor) for name, tensor in master.state().items())


def test_a_parameter_without_gradient_keeps_its_moments_going() -> None:
    model = linear(1.0)
    master = MasterWeights(model, betas=(0.9, 0.95))
    give(model, 1.0)
    master.step(**SETTINGS)
    model.weight.grad = torch.zeros_like(model.weight)
    master.step(**SETTINGS)  # the bias has none
    assert master.state()["step.bias"].item() == 2.0


kinds = st.sampled_from(["constant", "cosine", "wsd"])


@settings(max_examples=80, deadline=None)
@given(kinds, st.integers(1, 200), st.floats(0, 1), st.floats(0.05, 1), st.floats(0, 1))
def test_schedules_stay_between_their_ends(
    kind: str, num_steps: int, warmup: float, decay_share: float, final: float
) -> None:
    stage = StageConfig(
        peak_lr=2.0, num_steps=num_steps, schedule=kind,  # type: ignore[arg-type]
        warmup_steps=int(warmup * num_steps), decay_share=decay_share, final_lr_share=final,
    )  # fmt: skip
    rates = [learning_rate(stage, step) for step in range(num_steps + 5)]
    assert all(0 < rate <= 2.0 + 1e-12 for rate in rates[: stage.warmup_steps])
    after = rates[stage.warmup_steps :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))
    assert all(2.0 * final - 1e-12 <= rate for rate in after)
    assert after[-1] == pytest.approx(2.0 if kind == "constant" else 2.0 * final)


def test_schedules_worked_examples() -> None:
    wsd = StageConfig(peak_lr=1.0, num_steps=10, schedule="wsd", warmup_steps=2, decay_share=0.4, final_lr_share=0.1)
    rates = [learning_rate(wsd, step) for step in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.7, 0.4, 0.1])
    cosine = StageConfig(peak_lr=1.0, num_steps=5, schedule="cosine", final_lr_share=0.0)
    assert [learning_rate(cosine, step) for step in range(6)] == pytest.approx(
        [1, 0.8535533906, 0.5, 0.1464466094, 0, 0]
    )


@pytest.mark.parametrize(
    "change",
    [
        {"peak_lr": 0.0}, {"num_steps": 0}, {"schedule": "linear"}, {"warmup_steps": 11}, {"decay_share": 0.0},
        {"final_lr_share": 1.5}, {"weight_decay": -1.0}, {"max_grad_norm": 0.0},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_stage_that_cannot_run_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        StageConfig(**({"peak_lr": 1.0, "num_steps": 10} | change))  # type: ignore[arg-type]
