"""A recipe: everything that a run is made of, in one frozen value. Recipes are Python files that define `recipe`.

Numbers that the Composer 2 report does not publish are fields here, and ours.
"""

import dataclasses
import difflib
import hashlib
import json
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from tidemill.core.errors import UsageError
from tidemill.core.seams import Environment


def _positive(config: object, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise UsageError(f"{type(config).__name__}.{name} is {getattr(config, name)!r}: give a number above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Shape of a policy that starts from nothing: Qwen3-MoE in the Hugging Face layout."""

    vocab_size: int = 2048
    hidden_size: int = 160
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    num_experts: int = 4
    experts_per_token: int = 2
    expert_size: int = 320
    """Width of one expert's SwiGLU."""
    max_context_tokens: int = 1536
    rope_theta: float = 1000.0
    """Base of the rotary positions. Attention that copies forms sooner with a small one; contexts are short."""

    def __post_init__(self) -> None:
        _positive(self, *(field.name for field in dataclasses.fields(self)))
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}, "
                f"and that of num_kv_heads {self.num_kv_heads}"
            )
        if self.vocab_size < 512:
            raise UsageError(f"vocab_size is {self.vocab_size}: at least 512, for bytes, numbers and marks")
        if self.experts_per_token > self.num_experts:
            raise UsageError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingConfig:
    """Continued pre-training on real code: reading it, and mending faults planted in it."""

    num_steps: int
    num_copying_steps: int = 0
    """Of `num_steps`, the first ones, on random tokens that come twice: see `run.pretraining`."""
    tokens_per_step: int = 2048
    peak_lr: float = 2e-3
    code_weight: float = 0.2
    """Loss weight of a token of code, where one of the repair has 1."""
    max_functions: int = 30_000
    num_threads: int = 1
    """More than one pays for larger policies only: see docs/log.md."""

    def __post_init__(self) -> None:
        _positive(self, "tokens_per_step", "peak_lr", "max_functions", "num_threads")
        if self.code_weight < 0 or self.tokens_per_step < 2:
            raise UsageError(f"code_weight {self.code_weight} must be 0 or more, tokens_per_step at least 2")
        if not 0 <= self.num_copying_steps <= max(self.num_steps, 0):
            raise UsageError(f"num_copying_steps is {self.num_copying_steps}: between 0 and num_steps")
        if self.num_steps < 0:
            raise UsageError(f"num_steps is {self.num_steps}: 0 (none) or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemonstrationConfig:
    """SFT on episodes that a scripted demonstrator played in the very harness of RL."""

    num_episodes: int
    gold_probability: float = 0.6
    """That an edit of the demonstrator is the right one; otherwise a plausible wrong one, and it tries again."""
    num_steps: int
    episodes_per_step: int = 8
    peak_lr: float = 1e-3

    def __post_init__(self) -> None:
        _positive(self, "episodes_per_step", "peak_lr")
        if not 0 <= self.gold_probability <= 1:
            raise UsageError(f"gold_probability is {self.gold_probability}: between 0 and 1")
        if self.num_episodes < 0 or self.num_steps < 0 or bool(self.num_episodes) != bool(self.num_steps):
            raise UsageError(
                f"num_episodes {self.num_episodes} and num_steps {self.num_steps}: both above 0, or both 0 for none"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcementConfig:
    """Asynchronous RL: policy gradient, group-mean baseline, no std division, no length normalisation."""

    num_updates: int
    """0: the run ends with version 0."""
    group_size: int = 8
    groups_per_batch: int = 6
    max_age: int = 2
    """Bound on staleness, in versions; 0 is the synchronous loop."""
    peak_lr: float = 3e-4
    kl_weight: float = 0.0
    temperature: float = 1.0
    constrained: bool = False
    """Calls are sampled under the grammar of the renderer: tools that exist, lines that are shown, texts that stand on
    them. The learner renormalises over the same ids."""
    max_grad_norm: float = 1.0
    loss_constant: float = 32.0
    """Divides the sum over an attempt's tokens: about how many it samples."""
    shuffled_rewards: bool = False
    """A control that must not learn: the rewards of a batch are dealt out anew over its attempts, across groups."""

    def __post_init__(self) -> None:
        _positive(self, "group_size", "groups_per_batch", "peak_lr", "temperature", "max_grad_norm")
        _positive(self, "loss_constant")
        if self.num_updates < 0:
            raise UsageError(f"num_updates is {self.num_updates}: 0 (none) or more")
        if self.max_age < 0:
            raise UsageError(f"max_age is {self.max_age}: 0 (synchronous) or more")
        if self.kl_weight < 0:
            raise UsageError(f"kl_weight is {self.kl_weight}: 0 (none) or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Where episodes are played."""

    num_workers: int = 1
    num_slots: int = 16
    """Episodes at once, per worker."""
    num_engines: int = 1
    kv_policy: Literal["continue", "recompute", "finish"] = "continue"
    """What becomes of the KV cache when new weights arrive in the middle of a generation."""
    tier: Literal["namespaces", "local"] = "namespaces"

    def __post_init__(self) -> None:
        _positive(self, "num_workers", "num_slots", "num_engines")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out tasks, examined by a service of its own."""

    every: int
    """Versions between two examinations; the first and the last version are always examined."""
    num_tasks: int = 40
    num_samples: int = 1

    def __post_init__(self) -> None:
        _positive(self, "every", "num_tasks", "num_samples")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    tasks: str
    """A task manifest (`.json`) or a task set folder; relative to the recipe's file."""
    start_from: str | None = None
    """Folder of another run, whose version 0 this one begins with, or of a policy in the Hugging Face layout; relative
    to the recipe's file, or else to where the command runs. It has read no held-out module of *its* tasks: keep the
    same ones."""
    seed: int = 0
    policy: PolicyConfig = PolicyConfig()
    pretraining: PretrainingConfig
    demonstrations: DemonstrationConfig
    rl: ReinforcementConfig
    rollouts: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig
    max_window_lines: int = 40
    """Longer tasks are left out, of training and of evaluation alike: a small policy reads every token dearly."""
    num_validated_tasks: int = 20
    """Tasks that are run through their verifiers again before a new run starts."""
    environments: tyro.conf.Suppress[Mapping[str, Callable[[], Environment]]] = dataclasses.field(default_factory=dict)
    """Name in `Task.environment` → your class, beside the built-in `mend`."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that a file defines, with `--a.b VALUE` overrides applied. Raises `UsageError`."""
    if not path.is_file():
        raise UsageError(
            f"no recipe at {path}: give a Python file that defines `recipe`, such as recipes/quickstart.py"
        )
    try:
        found = runpy.run_path(str(path)).get("recipe")
    except UsageError:
        raise
    except Exception as error:  # whatever a user's file may raise
        raise UsageError(f"{path}: {type(error).__name__}: {error}{_did_you_mean(str(error))}") from error
    if not isinstance(found, Recipe):
        raise UsageError(f"{path} defines no `recipe`: end it with `recipe = Recipe(...)`, of tidemill.run.config")
    if not overrides:
        return found
    return tyro.cli(Recipe, default=found, args=list(overrides), prog=f"tidemill run {path}")


def _did_you_mean(message: str) -> str:
    """A hint for «unexpected keyword argument 'x'»."""
    kinds = [kind for kind in globals().values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    wrong = message.split("'")[1] if "unexpected keyword argument '" in message else ""
    close = difflib.get_close_matches(wrong, sorted(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def resolved(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data: what `--dry-run` prints, what `run.json` keeps and what the digest is taken of."""
    plain = dataclasses.asdict(dataclasses.replace(recipe, environments={}))
    plain["environments"] = {
        name: f"{make.__module__}.{make.__qualname__}" for name, make in recipe.environments.items()
    }
    return plain


def recipe_digest(recipe: Recipe) -> str:
    return hashlib.sha256(json.dumps(resolved(recipe), sort_keys=True).encode()).hexdigest()
