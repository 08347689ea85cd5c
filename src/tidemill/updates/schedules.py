"""Learning-rate schedules: pure functions of the step inside a stage."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """How the optimizer runs through one stage. No figure of it is published; all are ours."""

    peak_lr: float
    num_steps: int
    """Planned length; later steps keep the last rate."""
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    """`wsd`: warm-up, stable, decay."""
    warmup_steps: int = 0
    decay_share: float = 0.2
    """Of `num_steps`, at the end: how long `wsd` decays."""
    final_lr_share: float = 0.1
    """Of `peak_lr`: where `cosine` and `wsd` end."""
    weight_decay: float = 0.0
    """On matrices alone; norms never decay."""
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if not (self.peak_lr > 0 and self.num_steps > 0 and self.max_grad_norm > 0):
            raise ValueError(
                f"peak_lr {self.peak_lr}, num_steps {self.num_steps} and max_grad_norm {self.max_grad_norm} "
                "must be above 0"
            )
        if self.schedule not in ("constant", "cosine", "wsd"):
            raise ValueError(f"schedule {self.schedule!r}: choose constant, cosine or wsd")
        if not (0 <= self.warmup_steps <= self.num_steps):
            raise ValueError(f"warmup_steps {self.warmup_steps} must lie in the {self.num_steps} steps of the stage")
        if not (0 < self.decay_share <= 1 and 0 <= self.final_lr_share <= 1 and self.weight_decay >= 0):
            raise ValueError(
                f"decay_share {self.decay_share} and final_lr_share {self.final_lr_share} are shares of 1, "
                f"weight_decay {self.weight_decay} is at least 0"
            )


def learning_rate(stage: StageConfig, step: int) -> float:
    """The rate of update `step`, counted from 0 in the stage."""
    if step < stage.warmup_steps:
        return stage.peak_lr * (step + 1) / stage.warmup_steps
    if stage.schedule == "constant":
        return stage.peak_lr
    if stage.schedule == "cosine":
        progress = _progress(step, stage.warmup_steps, stage.num_steps)
        share = (1 + math.cos(math.pi * progress)) / 2
    else:
        start = max(stage.warmup_steps, stage.num_steps - round(stage.decay_share * stage.num_steps))
        share = 1 - _progress(step, start, stage.num_steps)
    return stage.peak_lr * (stage.final_lr_share + (1 - stage.final_lr_share) * share)


def _progress(step: int, start: int, end: int) -> float:
    """0 at `start`, 1 at the last step before `end` and after it."""
    return min(max((step - start) / max(end - 1 - start, 1), 0.0), 1.0)
