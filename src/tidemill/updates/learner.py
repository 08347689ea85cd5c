"""The learner: one set of weights and one optimizer through pre-training, demonstrations and reinforcement.

    cpt  train_text            rows of documents        next token, weighted
    sft  train_demonstrations  trajectories             next token, on the demonstrator's tokens
    rl   train_batch           a batch of whole groups  policy gradient; each update makes the next version

Stages come in this order, any of them may be left out; entering one starts its schedule and clears the moments.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import torch
from torch import Tensor

from tidemill.core.errors import ModelError, TrainingHalted
from tidemill.core.records import Batch, Trajectory
from tidemill.core.seams import Weights
from tidemill.models.config import ModelConfig, config_to_hf
from tidemill.models.hf import fill, model_of, weights_of
from tidemill.models.transformer import Transformer, init_model
from tidemill.updates.corpus import Document
from tidemill.updates.gradients import Forward, Loss, NotFinite, Tally, accumulate, culprits, forward, quantiles
from tidemill.updates.losses import (
    Metrics,
    k1,
    kl_advantages,
    next_token_loss,
    policy_gradient_loss,
    token_mean_loss,
    truncated_importance,
)
from tidemill.updates.master import MasterWeights
from tidemill.updates.packing import PackedBatch, pack, pack_demonstrations, pack_text
from tidemill.updates.resume import LearnerState, fill_tensors, read_state, save_checkpoint
from tidemill.updates.schedules import StageConfig, learning_rate

TrainingStage = Literal["cpt", "sft", "rl"]
_STAGES: tuple[TrainingStage, ...] = ("cpt", "sft", "rl")


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """The first three say how each stage runs; the rest, how the loss of RL is made."""

    cpt: StageConfig
    sft: StageConfig
    rl: StageConfig
    max_pack_tokens: int
    """Positions in one micro-batch: bounds memory, and no sequence may be longer. Changes no gradient."""
    beta1: float = 0.9
    beta2: float = 0.95
    loss_constant: float = 128.0
    """The constant of `policy_gradient_loss`: about the sampled tokens of an attempt."""
    loss_mean: Literal["attempts", "tokens"] = "attempts"
    importance_cap: float | None = None
    """Cap of truncated importance sampling; None: no importance weight, as published."""
    kl_weight: float = 0.0
    """Weight of the KL term against the reference policy; see `kl_advantages`."""
    min_gate_share: float = 0.0
    """Plausibility of replayed experts: see `models.experts.replay_routes`. 0 takes every recorded one."""

    def __post_init__(self) -> None:
        if self.max_pack_tokens < 2 or not self.loss_constant > 0:
            raise ValueError(
                f"max_pack_tokens {self.max_pack_tokens} must be at least 2, loss_constant {self.loss_constant} above 0"
            )
        if self.loss_mean not in ("attempts", "tokens"):
            raise ValueError(f"loss_mean {self.loss_mean!r}: choose attempts or tokens")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.min_gate_share >= 0 and self.kl_weight >= 0):
            raise ValueError("beta1 and beta2 lie in [0, 1); min_gate_share and kl_weight are at least 0")
        if self.importance_cap is not None and not self.importance_cap > 0:
            raise ValueError(f"importance_cap is {self.importance_cap}: give a number above 0, or None for no weight")


@final
class Learner:
    """Weights, optimizer and counters. An update happens whole, or raises `TrainingHalted` and changes nothing."""

    def __init__(self, config: LearnerConfig, model_config: ModelConfig, source: Weights | int) -> None:
        """`source`: the weights to start from, or the seed of fresh ones."""
        self.config = config
        if isinstance(source, int):
            self.model = init_model(model_config, source)
        else:
            self.model = Transformer(model_config)
            fill(self.model, source)
        self.master = MasterWeights(self.model, betas=(config.beta1, config.beta2))
        self.stage: TrainingStage | None = None
        self.stage_step = 0
        self.step = 0
        """Updates so far, over all stages."""
        self.version = 0
        """The version as which the present weights are published: 0 until the first update of RL."""
        self.position: dict[str, int] = {}
        """Where the stage's data goes on; set by whoever feeds the data, kept with the checkpoint."""
        self._reference: Transformer | None = None

    # --- stages ----------------------------------------------------------------------------------------------

    def train_text(self, rows: Sequence[Sequence[Document]]) -> Metrics:
        """One update of pre-training: rows of pieces, as `Corpus.next_rows` gives them."""
        self._enter("cpt")
        return self._supervised(pack_text(rows, max_tokens=self.config.max_pack_tokens))

    def train_demonstrations(
        self, trajectories: Sequence[Trajectory], weights: Mapping[str, float] | None = None
    ) -> Metrics:
        """One update on the sampled tokens of demonstrations. `weights`: by attempt id; 1 for all where None."""
        self._enter("sft")
        return self._supervised(pack_demonstrations(trajectories, weights, max_tokens=self.config.max_pack_tokens))

    def train_batch(self, batch: Batch, trajectories: Mapping[str, Sequence[Trajectory]]) -> Metrics:
        """One update of RL: batch k trains version k into version k + 1.

        trajectories: by attempt id, for exactly the attempts of the batch; an attempt that sampled nothing has none,
        and still counts in the denominator. Raises `ValueError` where batch and trajectories do not belong together,
        `TrainingHalted` for a batch out of turn, or a loss or gradient that is not finite.
        """
        if batch.index != self.version:
            raise TrainingHalted(f"batch {batch.index} cannot train version {self.version}: its turn is another")
        members = [item.attempt_id for item in batch.items]
        if len(set(members)) != len(members) or set(members) != trajectories.keys():
            strays = sorted(set(members) ^ trajectories.keys())
            raise ValueError(f"batch {batch.index} and its trajectories differ in attempts: {', '.join(strays[:5])}")
        if batch.stage != "rl" or not members:
            raise ValueError(
                f"batch {batch.index} has {len(members)} attempts of stage {batch.stage}: need RL attempts"
            )
        ordered = [one for member in members for one in trajectories[member]]
        for member in members:
            if any(one.attempt_id != member for one in trajectories[member]):
                raise ValueError(f"trajectories of another attempt were given as those of {member}")
        self._enter("rl")
        advantages = {item.attempt_id: item.advantage for item in batch.items}
        kl_metrics: Metrics = {}
        if self.config.kl_weight > 0:
            kl_metrics = self._add_kl(batch, ordered, advantages)
        size = self.config.max_pack_tokens
        # All tokens are looked at; a backward pass is only worth its time where an advantage moves anything.
        live = pack((one for one in ordered if advantages[one.attempt_id] != 0), advantages, max_tokens=size)
        idle = pack((one for one in ordered if advantages[one.attempt_id] == 0), advantages, max_tokens=size)
        loss = self._policy_loss(len(members), sum(packed.num_trained for packed in (*live, *idle)))
        tally, metrics = self._update(live, idle, loss)
        self.version += 1
        return {
            **metrics,
            **tally.behaviour(batch.index),
            **quantiles("age", (batch.index - item.oldest_version for item in batch.items if item.oldest_version >= 0)),
            **kl_metrics,
            **_reward_metrics(batch),
        }

    def weights(self, tokenizer: Mapping[str, bytes]) -> Weights:
        """What is published: the bfloat16 image that the forward pass uses. `tokenizer`: file name → content."""
        return weights_of(self.model, tokenizer)

    def hold_reference(self, weights: Weights) -> None:
        """Set π_ref, a published version. Not saved: set it again after `load`."""
        self._reference = model_of(weights)

    # --- resume ----------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the resume state of this step under `folder`, whole or not at all; the last two steps are kept."""
        state = LearnerState(
            model=config_to_hf(self.model.config),
            stage=self.stage or "",
            stage_step=self.stage_step,
            step=self.step,
            version=self.version,
            position=dict(self.position),
        )
        save_checkpoint(folder, state, {**self.master.state(), "random_state": torch.get_rng_state()})

    def load(self, folder: Path) -> bool:
        """Go on from the newest step under `folder`; False where there is none. What follows is bit-identical to a
        learner that was never stopped (same threads). Raises `ModelError` for a damaged or unfitting one."""
        state = read_state(folder)
        if state is None:
            return False
        if state.model != config_to_hf(self.model.config):
            raise ModelError(
                f"the checkpoint in {folder} is of another model: resume with the recipe that began the run"
            )
        random_state = torch.get_rng_state()
        fill_tensors(folder, state.step, {**self.master.state(), "random_state": random_state})
        torch.set_rng_state(random_state)
        self.master.loaded()
        self.stage = next((stage for stage in _STAGES if stage == state.stage), None)
        self.stage_step, self.step, self.version = state.stage_step, state.step, state.version
        self.position = dict(state.position)
        return True

    # --- inside ----------------------------------------------------------------------------------------------

    def _enter(self, stage: TrainingStage) -> None:
        if self.stage == stage:
            return
        if self.stage is not None and _STAGES.index(stage) < _STAGES.index(self.stage):
            raise ValueError(f"stage {stage} comes before {self.stage}, which has begun: start a new learner")
        self.stage, self.stage_step, self.position = stage, 0, {}
        self.master.reset_optimizer()

    def _supervised(self, packs: list[PackedBatch]) -> Metrics:
        total = sum(float(packed.weights_T[packed.mask_T].double().sum()) for packed in packs)
        if not total > 0:
            raise ValueError("no token of these samples has a loss weight above 0: leave them out")

        def loss(seen: Forward, packed: PackedBatch) -> tuple[Tensor, Metrics]:
            return next_token_loss(seen.logprobs_T, packed.weights_T, packed.mask_T, total)

        _, metrics = self._update(packs, [], loss)
        metrics["nll"] = metrics.pop("nll_sum") / metrics["num_loss_tokens"]
        return metrics

    def _policy_loss(self, num_attempts: int, num_tokens: int) -> Loss:
        config = self.config

        def loss(seen: Forward, packed: PackedBatch) -> tuple[Tensor, Metrics]:
            advantages_T, metrics = packed.advantages_T, {}
            if config.importance_cap is not None:
                weights_T, found = truncated_importance(
                    seen.logprobs_T, packed.behaviour_T, packed.mask_T, config.importance_cap
                )
                advantages_T, metrics = advantages_T * weights_T, {"num_truncated": found["num_truncated"]}
            if config.loss_mean == "tokens":
                value, _ = token_mean_loss(seen.logprobs_T, advantages_T, packed.mask_T, num_tokens)
            else:
                value, _ = policy_gradient_loss(
                    seen.logprobs_T, advantages_T, packed.mask_T, num_attempts, config.loss_constant
                )
            return value, metrics

        return loss

    def _update(self, live: list[PackedBatch], idle: list[PackedBatch], loss: Loss) -> tuple[Tally, Metrics]:
        """Gradients of `live`, a look at `idle`, one optimizer step. Raises `TrainingHalted` with nothing changed."""
        start = time.monotonic()
        stage = self._stage_config()
        share = self.config.min_gate_share
        tally = Tally()
        self.master.clear_gradients()
        try:
            accumulate(self.model, live, loss, tally, min_gate_share=share)
            accumulate(self.model, idle, loss, tally, min_gate_share=share, backward=False)
            rate = learning_rate(stage, self.stage_step)
            if not self.master.gradient_norm() < float("inf"):
                names = culprits(self.model, live, loss, min_gate_share=share)
                raise NotFinite(f"the gradient of {', '.join(names) or 'their sum, of none alone,'} is not finite")
            moved = self.master.step(
                learning_rate=rate, weight_decay=stage.weight_decay, max_grad_norm=stage.max_grad_norm
            )
        except NotFinite as error:
            self.master.clear_gradients()
            raise TrainingHalted(
                f"update {self.step + 1} ({self.stage}) was not applied: {error}. The weights are those of update "
                f"{self.step}; lower the learning rate, or look at that sample"
            ) from error
        self.step += 1
        self.stage_step += 1
        wall_s = time.monotonic() - start
        return tally, {
            **tally.metrics(),
            **moved,
            "learning_rate": rate,
            "stage_step": float(self.stage_step),
            "wall_s": wall_s,
            "tokens_per_s": tally.num_tokens / max(wall_s, 1e-9),
        }

    def _stage_config(self) -> StageConfig:
        configs: dict[TrainingStage | None, StageConfig] = {
            "cpt": self.config.cpt,
            "sft": self.config.sft,
            "rl": self.config.rl,
        }
        return configs[self.stage]

    @torch.no_grad()
    def _add_kl(self, batch: Batch, ordered: Sequence[Trajectory], advantages: dict[str, float]) -> Metrics:
        """Add the KL term to the advantages, in place: one more forward pass of the policy, one of the reference."""
        if self._reference is None:
            raise ValueError(f"kl_weight is {self.config.kl_weight} but no reference is held: call hold_reference")
        share = self.config.min_gate_share
        sums = dict.fromkeys(advantages, 0.0)
        num_tokens = 0
        for packed in pack(ordered, advantages, max_tokens=self.config.max_pack_tokens):
            policy = forward(self.model, packed, share)
            reference = forward(self._reference, packed, share)
            kl_T, _ = k1(policy.logprobs_T, reference.logprobs_T, packed.mask_T)
            per_owner = torch.zeros(len(packed.owners), dtype=torch.float64)
            per_owner.index_add_(0, packed.owner_T, kl_T.double())
            for owner, value in zip(packed.owners, per_owner.tolist(), strict=True):
                sums[owner] += value
            num_tokens += packed.num_trained
        kl_N = torch.tensor([sums[item.attempt_id] for item in batch.items], dtype=torch.float64)
        terms_N, metrics = kl_advantages(kl_N, [item.group_id for item in batch.items], self.config.kl_weight)
        for item, term in zip(batch.items, terms_N.tolist(), strict=True):
            advantages[item.attempt_id] += term
        return {**metrics, "kl_reference": float(kl_N.sum()) / max(num_tokens, 1)}


def _reward_metrics(batch: Batch) -> Metrics:
    num = len(batch.items)
    moving = {item.group_id for item in batch.items if item.advantage != 0}
    groups = {item.group_id for item in batch.items}
    return {
        "reward_mean": sum(item.reward for item in batch.items) / num,
        "advantage_abs_mean": sum(abs(item.advantage) for item in batch.items) / num,
        "num_attempts": float(num),
        "num_groups": float(len(groups)),
        "equal_groups_share": 1 - len(moving) / len(groups),
    }
