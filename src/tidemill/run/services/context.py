"""What every service begins with: its run, its recipe, where the others are."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tidemill.batches.client import HttpCoordinator
from tidemill.core.blobs import FolderBlobs
from tidemill.core.events import EventLog
from tidemill.deltas.store import FolderStore
from tidemill.models.config import ModelConfig
from tidemill.run.config import PolicyConfig, Recipe, load_recipe
from tidemill.run.folder import RunFolder, RunInfo
from tidemill.text.compact import CompactRenderer
from tidemill.text.tokenizer import Tokenizer

COORDINATOR = "coordinator-0"


@final
@dataclass(frozen=True, kw_only=True)
class Context:
    who: str
    folder: RunFolder
    info: RunInfo
    recipe: Recipe
    ports: dict[str, int]
    """Service → port on 127.0.0.1."""
    events: EventLog
    blobs: FolderBlobs
    store: FolderStore

    def url(self, who: str) -> str:
        return f"http://127.0.0.1:{self.ports[who]}"

    def coordinator(self, patience_s: float = 600.0) -> HttpCoordinator:
        return HttpCoordinator(self.url(COORDINATOR), self.folder.token(), patience_s=patience_s)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(tokenizer_folder(self.folder))

    def renderer(self) -> CompactRenderer:
        return CompactRenderer(self.tokenizer())

    @property
    def tasks(self) -> Path:
        return tasks_folder(self.folder)


def tasks_folder(folder: RunFolder) -> Path:
    return folder.path / "tasks"


def tokenizer_folder(folder: RunFolder) -> Path:
    return folder.path / "tokenizer"


def corpus_file(folder: RunFolder) -> Path:
    return folder.path / "corpus.bin"


def recipe_file(folder: RunFolder) -> Path:
    """A copy of the recipe, so that a run can be resumed when the original has changed."""
    return folder.path / "recipe.py"


def overrides_file(folder: RunFolder) -> Path:
    return folder.path / "overrides.json"


def saved_recipe(folder: RunFolder) -> Recipe:
    """The recipe that a run was started with."""
    return load_recipe(recipe_file(folder), json.loads(overrides_file(folder).read_text()))


def open_context(path: Path, who: str, ports: dict[str, int]) -> Context:
    folder = RunFolder(path)
    return Context(
        who=who,
        folder=folder,
        info=folder.info(),
        recipe=saved_recipe(folder),
        ports=ports,
        events=EventLog(folder.events, who),
        blobs=FolderBlobs(folder.blobs),
        store=FolderStore(folder.store),
    )


def model_config(policy: PolicyConfig, vocab_size: int) -> ModelConfig:
    """The transformer of a policy that starts from nothing, over a tokenizer's vocabulary."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=policy.hidden_size,
        num_layers=policy.num_layers,
        num_heads=policy.num_heads,
        num_kv_heads=policy.num_kv_heads,
        head_dim=policy.hidden_size // policy.num_heads,
        num_experts=policy.num_experts,
        experts_per_token=policy.experts_per_token,
        expert_size=policy.expert_size,
        max_positions=policy.max_context_tokens,
        rope_theta=policy.rope_theta,
    )
