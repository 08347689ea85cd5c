"""The learner through its stages: what each option does, what is refused, what halts."""

import dataclasses

import numpy as np
import pytest
import torch

from support.update_samples import TINY, group_batch, learner_config, sharp_model, trajectory
from tidemill.core.errors import ModelError, TrainingHalted
from tidemill.core.records import Array, Batch, Trajectory
from tidemill.models.hf import weights_of
from tidemill.updates.corpus import Corpus, document
from tidemill.updates.gradients import forward
from tidemill.updates.learner import Learner, LearnerConfig
from tidemill.updates.packing import pack
from tidemill.updates.schedules import StageConfig

SHARP = weights_of(sharp_model(0), {})


def learner(**changes: object) -> Learner:
    return Learner(learner_config(**changes), TINY, SHARP)


def logprob(one: Learner, row: Trajectory) -> float:
    (packed,) = pack([row], {row.attempt_id: 1.0}, max_tokens=100)
    with torch.no_grad():
        return float(forward(one.model, packed, 0.0).logprobs_T.sum())


def state(one: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.master.state().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_pre_training_learns_a_text() -> None:
    corpus = Corpus([document([5, 9, 2, 7, 5, 9, 2, 7, 5, 9]) for _ in range(4)], row_tokens=20, seed=0)
    one = Learner(learner_config(), TINY, 0)
    losses = [one.train_text(corpus.next_rows(2))["nll"] for _ in range(30)]
    assert losses[0] == pytest.approx(np.log(TINY.vocab_size), rel=0.05)
    assert losses[-1] < 1.0
    assert (one.stage, one.step, one.stage_step, one.version) == ("cpt", 30, 30, 0)


def test_loss_weights_decide_what_is_learnt() -> None:
    """Two texts, one with weight 0: only the other one becomes likely."""
    one = Learner(learner_config(), TINY, 0)
    rows = [(document([1, 2] * 6, 1.0),), (document([3, 4] * 6, 0.0),)]
    for _ in range(20):
        metrics = one.train_text(rows)
    assert metrics["num_loss_tokens"] == 11
    learnt, ignored = (
        Learner(learner_config(), TINY, one.weights({})).train_text([(document(tokens),)])["nll"]
        for tokens in ([1, 2] * 6, [3, 4] * 6)
    )
    assert learnt < 1.0 < ignored
    with pytest.raises(ValueError, match="no token of these samples has a loss weight"):
        one.train_text([rows[1]])


def test_demonstrations_become_likely_and_weights_count() -> None:
    good, bad = trajectory("good", 1), trajectory("bad", 2)
    one = learner()
    before = logprob(one, good)
    for _ in range(10):
        one.train_demonstrations([good, bad], {"good": 1.0, "bad": 0.0})
    assert logprob(one, good) > before + 5
    assert (one.stage, one.version) == ("sft", 0)


def test_reinforcement_moves_with_the_sign_of_the_advantage() -> None:
    one = learner()
    batch, trajectories = group_batch(0, [1.0, 0.0], group_size=2)
    winner, loser = (trajectories[item.attempt_id][0] for item in batch.items)
    before = logprob(one, winner), logprob(one, loser)
    metrics = one.train_batch(batch, trajectories)
    assert logprob(one, winner) > before[0]
    assert logprob(one, loser) < before[1]
    assert (one.version, one.step, one.stage) == (1, 1, "rl")
    assert metrics["reward_mean"] == 0.5
    assert metrics["advantage_abs_mean"] == 0.5
    assert all(np.isfinite(list(metrics.values())))


def test_ages_and_distances_are_reported() -> None:
    one = learner()
    for index in range(3):
        batch, trajectories = group_batch(index, [1.0, 0.0, 0.0], group_size=3, oldest_version=max(index - 2, 0))
        metrics = one.train_batch(batch, trajectories)
    assert metrics["age_p50"] == metrics["age_p99"] == metrics["token_age_max"] == 2.0
    expected = [
        abs(value) for rows in trajectories.values() for row in rows for value in _gaps(one, row)
    ]  # after the update: only that the figure is of this order
    assert 0 < metrics["dlogp_p99"] <= metrics["dlogp_max"] < 10 * max(expected)
    assert 0 < metrics["ess_share"] < 1
    assert metrics["k3"] > 0


def _gaps(one: Learner, row: Trajectory) -> list[float]:
    (packed,) = pack([row], {row.attempt_id: 1.0}, max_tokens=100)
    with torch.no_grad():
        seen = forward(one.model, packed, 0.0)
    return (seen.logprobs_T - packed.behaviour_T)[packed.mask_T].tolist()


# --- options -------------------------------------------------------------------------------------------------


def first_update(**changes: object) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    one = learner(**changes)
    if changes.get("kl_weight"):
        one.hold_reference(weights_of(sharp_model(5), {}))
    batch, trajectories = group_batch(0, [1.0, 0.0, 0.0, 0.5, 0.0, 0.0], group_size=3)
    routed = {name: [_with_routes(row) for row in rows] for name, rows in trajectories.items()}
    return one.train_batch(batch, routed), state(one)


def _with_routes(row: Trajectory) -> Trajectory:
    routes = trajectory("r", 3, length=len(row.token_ids.numpy()), routes=True).routes
    return Trajectory(**{field: getattr(row, field) for field in row.__struct_fields__} | {"routes": routes})


@pytest.mark.parametrize(
    "change",
    [
        {"beta1": 0.5}, {"beta2": 0.5}, {"loss_constant": 64.0}, {"loss_mean": "tokens"}, {"importance_cap": 0.5},
        {"kl_weight": 0.1}, {"min_gate_share": 1.0},
        {"rl": StageConfig(peak_lr=2e-2, num_steps=100)},
        {"rl": StageConfig(peak_lr=1e-2, num_steps=100, warmup_steps=10)},
        {"rl": StageConfig(peak_lr=1e-2, num_steps=100, weight_decay=0.5)},
        {"rl": StageConfig(peak_lr=1e-2, num_steps=100, max_grad_norm=1e-3)},
    ],
    ids=str,
)  # fmt: skip
def test_every_option_changes_the_update(change: dict[str, object]) -> None:
    assert not same(first_update()[1], first_update(**change)[1])


def test_the_schedule_of_a_stage_counts_the_steps_of_that_stage() -> None:
    wsd = StageConfig(peak_lr=1.0, num_steps=4, schedule="wsd", warmup_steps=2, decay_share=0.5, final_lr_share=0.1)
    one = learner(sft=StageConfig(peak_lr=0.5, num_steps=9), rl=wsd)
    assert [one.train_demonstrations([trajectory("a", 0)])["learning_rate"] for _ in range(3)] == [0.5] * 3
    batches = [group_batch(index, [1.0, 0.0], group_size=2) for index in range(4)]
    assert [one.train_batch(*batch)["learning_rate"] for batch in batches] == pytest.approx([0.5, 1.0, 1.0, 0.1])


def test_the_size_of_micro_batches_changes_no_gradient() -> None:
    norms = [first_update(max_pack_tokens=size)[0]["grad_norm"] for size in (16, 64, 4096)]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_replayed_routes_are_used_and_counted() -> None:
    metrics, _ = first_update()
    plain = learner()
    batch, trajectories = group_batch(0, [1.0, 0.0, 0.0, 0.5, 0.0, 0.0], group_size=3)
    without = plain.train_batch(batch, trajectories)
    assert metrics["grad_norm"] != without["grad_norm"]
    assert first_update(min_gate_share=1.0)[0]["routes_replaced_share"] > 0.05
    assert without["routes_missing_share"] == 0.0


def test_the_kl_term_draws_towards_the_reference() -> None:
    """With equal task rewards, attempts that the policy likes more than the reference does become less likely."""
    one = learner(kl_weight=1.0)
    one.hold_reference(weights_of(sharp_model(5), {}))
    batch, trajectories = group_batch(0, [0.0] * 4, group_size=4)
    found = [one.train_batch(Batch(index=i, stage="rl", items=batch.items, group_size=4), trajectories)
             for i in range(15)]  # fmt: skip
    assert found[0]["grad_norm"] > 0
    spread = [abs(m["kl_reference_per_attempt"]) for m in found]
    assert np.isfinite(spread).all()
    with pytest.raises(ValueError, match="hold_reference"):
        learner(kl_weight=1.0).train_batch(batch, trajectories)


@pytest.mark.parametrize(
    "change",
    [
        {"max_pack_tokens": 1}, {"loss_constant": 0.0}, {"loss_mean": "groups"}, {"importance_cap": 0.0},
        {"kl_weight": -0.1}, {"min_gate_share": -1.0}, {"beta1": 1.0}, {"beta2": -0.1},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_configuration_that_cannot_train_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        learner_config(**change)


def test_configurations_are_frozen_and_few() -> None:
    assert len(dataclasses.fields(LearnerConfig)) <= 15
    with pytest.raises(dataclasses.FrozenInstanceError):
        learner_config().kl_weight = 1.0  # type: ignore[misc]


# --- refusals and halts --------------------------------------------------------------------------------------


def test_a_batch_out_of_turn_halts() -> None:
    one = learner()
    one.train_batch(*group_batch(0, [1.0, 0.0], group_size=2))
    for index in (0, 2):
        with pytest.raises(TrainingHalted, match=f"batch {index} cannot train version 1"):
            one.train_batch(*group_batch(index, [1.0, 0.0], group_size=2))
    assert one.version == 1


def test_batch_and_trajectories_belong_together() -> None:
    one = learner()
    batch, trajectories = group_batch(0, [1.0, 0.0], group_size=2)
    names = [item.attempt_id for item in batch.items]
    with pytest.raises(ValueError, match=f"differ in attempts: {names[1]}"):
        one.train_batch(batch, {names[0]: trajectories[names[0]]})
    with pytest.raises(ValueError, match="differ in attempts: stray"):
        one.train_batch(batch, trajectories | {"stray": []})
    with pytest.raises(ValueError, match="of another attempt"):
        one.train_batch(batch, {names[0]: trajectories[names[1]], names[1]: trajectories[names[0]]})
    with pytest.raises(ValueError, match="of stage sft"):
        one.train_batch(Batch(index=0, stage="sft", items=batch.items, group_size=2), trajectories)
    twice = Batch(index=0, stage="rl", items=(batch.items[0], batch.items[0]), group_size=2)
    with pytest.raises(ValueError, match="differ in attempts"):
        one.train_batch(twice, {names[0]: trajectories[names[0]]})
    assert (one.step, one.version) == (0, 0)


def test_an_attempt_that_sampled_nothing_still_counts() -> None:
    batch, trajectories = group_batch(0, [1.0, 0.0, 0.0, 0.0], group_size=4)
    silent = batch.items[1].attempt_id
    without = Batch(index=0, stage="rl", items=batch.items[:1], group_size=1)
    name = batch.items[0].attempt_id
    alone = learner().train_batch(without, {name: trajectories[name]})
    four = {item.attempt_id: [] if item.attempt_id != name else trajectories[name] for item in batch.items}
    counted = learner().train_batch(batch, four)
    assert silent in four
    assert counted["grad_norm"] == pytest.approx(alone["grad_norm"] / 4, rel=1e-6)
    nobody = learner().train_batch(batch, {item.attempt_id: [] for item in batch.items})
    assert (nobody["grad_norm"], nobody["num_loss_tokens"]) == (0.0, 0.0)


def test_stages_do_not_go_back() -> None:
    one = learner()
    one.train_batch(*group_batch(0, [1.0, 0.0], group_size=2))
    with pytest.raises(ValueError, match="stage sft comes before rl"):
        one.train_demonstrations([trajectory("a", 0)])


def test_entering_a_stage_clears_moments_schedule_and_position() -> None:
    one = learner()
    one.train_demonstrations([trajectory("a", 0)])
    one.position = {"epoch": 3}
    fresh = Learner(learner_config(), TINY, one.weights({}))
    with torch.no_grad():  # the masters too, with what bfloat16 does not show
        for name, master in fresh.master.masters.items():
            master.copy_(one.master.masters[name])
    batch, trajectories = group_batch(0, [1.0, 0.0], group_size=2)
    one.train_batch(batch, trajectories)
    fresh.train_batch(batch, trajectories)
    assert same(state(one), state(fresh))
    assert (one.stage_step, one.step, one.position) == (1, 2, {})


def test_a_log_probability_that_is_not_finite_halts_and_names_the_attempt() -> None:
    """A row of the embedding is NaN: the attempt that meets it is named, and no weight moves."""
    one = learner()
    batch, trajectories = group_batch(0, [1.0, 0.0, 0.5, 0.5], group_size=2)
    guilty = batch.items[3].attempt_id
    clean = {
        name: [_with_tokens(row, np.minimum(row.token_ids.numpy(), 46)) for row in rows]
        for name, rows in trajectories.items()
    }
    tokens = clean[guilty][0].token_ids.numpy().copy()
    tokens[0] = 47
    clean[guilty] = [_with_tokens(clean[guilty][0], tokens), *clean[guilty][1:]]
    embedding = one.model.embed_VD
    head = torch.nn.Parameter(embedding.detach().clone())
    one.model.lm_head_VD = head  # untied here: a poisoned input row must not reach every output
    with torch.no_grad():
        embedding[47] = float("nan")
    before = state(one)
    with pytest.raises(TrainingHalted, match=rf"update 1 \(rl\) was not applied: .*{guilty}") as halted:
        one.train_batch(batch, clean)
    for item in batch.items[:3]:
        assert item.attempt_id not in str(halted.value)
    assert same(state(one), before)
    assert (one.version, one.step) == (0, 0)


def _with_tokens(row: Trajectory, tokens: np.ndarray) -> Trajectory:
    return Trajectory(
        **{field: getattr(row, field) for field in row.__struct_fields__} | {"token_ids": Array.of(tokens, "int32")}
    )


def test_a_gradient_that_is_not_finite_halts_and_names_the_attempt() -> None:
    """Loss finite, gradient not: a hook blows up what flows back from one token id."""
    one = learner()
    batch, trajectories = group_batch(0, [1.0, 0.0, 1.0, 0.0], group_size=2)
    clean = {
        name: [_with_tokens(row, np.minimum(row.token_ids.numpy(), 46)) for row in rows]
        for name, rows in trajectories.items()
    }
    guilty = batch.items[2].attempt_id
    tokens = clean[guilty][0].token_ids.numpy().copy()
    tokens[0] = 47
    clean[guilty] = [_with_tokens(clean[guilty][0], tokens), *clean[guilty][1:]]

    def blow_up(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        x_TD = arguments[0]
        hit_T = (x_TD.detach() == one.model.embed_VD.detach()[47]).all(-1)
        if x_TD.requires_grad and bool(hit_T.any()):
            x_TD.register_hook(lambda grad: torch.where(hit_T.unsqueeze(1), float("inf"), grad))

    one.model.layers[0].register_forward_pre_hook(blow_up)
    before = state(one)
    with pytest.raises(TrainingHalted, match=f"the gradient of {guilty} is not finite"):
        one.train_batch(batch, clean)
    assert same(state(one), before)
    assert one.version == 0


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(ModelError, match="another model"):
        Learner(learner_config(), dataclasses.replace(TINY, hidden_size=32), SHARP)
