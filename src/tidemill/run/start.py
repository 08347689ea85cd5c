"""A run that starts from another one's version 0, or from a policy's folder: what it needs is copied."""

import os
import shutil
import tempfile
from pathlib import Path

from tidemill.core.errors import ModelError, StoreError, UsageError
from tidemill.core.seams import Weights
from tidemill.deltas.store import FolderStore
from tidemill.models.config import config_from_hf
from tidemill.run.config import Recipe
from tidemill.run.folder import RunFolder
from tidemill.run.services.context import corpus_file, model_config, tokenizer_folder
from tidemill.tasks.folder import TaskSet
from tidemill.text.tokenizer import Tokenizer


def start_folder(folder: RunFolder) -> Path:
    """A store of one version: what the run began with."""
    return folder.path / "start"


def find_start(wanted: str, beside: Path) -> Path:
    """The folder that `Recipe.start_from` means: from beside the recipe, else from where the command runs."""
    for path in (beside / wanted, Path(wanted)):
        if path.is_dir():
            return path.resolve()
    raise UsageError(f"start_from is {wanted}: no folder there, nor in {beside}; give a run's, or a policy's")


def take_over(folder: RunFolder, recipe: Recipe, start: Path) -> None:
    """Copy what `recipe.start_from` names. Idempotent: the tokenizer comes last, and with it all is there.

    Raises `UsageError` where there is nothing to start from, or a policy of another shape than the recipe's.
    """
    if start == folder.path.resolve():
        raise UsageError(f"start_from is {start}, this run's own folder: give that of another run")
    weights, run_id = _policy_folder(start) if (start / "config.json").exists() else _run_folder(start, folder)
    tokenizer = Tokenizer.from_files(weights.tokenizer)
    wanted, found = model_config(recipe.policy, tokenizer.vocab_size), config_from_hf(weights.config)
    if wanted != found:
        names = [name for name in vars(found) if getattr(found, name) != getattr(wanted, name)]
        told = ", ".join(f"{name} {getattr(found, name)}, not {getattr(wanted, name)}" for name in names)
        raise UsageError(f"the policy of {start} has {told}: put its shape into the recipe's `policy`")
    FolderStore(start_folder(folder)).publish(weights, version=0, batch=None, step=0, run_id=run_id)
    whole = Path(tempfile.mkdtemp(dir=folder.path, prefix=".tokenizer-"))
    tokenizer.save(whole)
    os.rename(whole, tokenizer_folder(folder))


def refuse_leak(mine: TaskSet, others: TaskSet) -> None:
    """Raises `UsageError` where the run that is started from has trained on a module that this one examines."""

    def modules(tasks: TaskSet, *, trained: bool) -> set[tuple[str, str]]:
        return {
            (task.provenance.get("package", ""), str(task.data["path"]))
            for task in tasks.tasks
            if "path" in task.data and (task.split == "train") == trained
        }

    leaked = sorted(modules(mine, trained=False) & modules(others, trained=True))
    if leaked:
        raise UsageError(
            f"start_from: that run has trained on {leaked[0][1]}, which these tasks hold out ({len(leaked)} such "
            "modules): start from a run with the same split"
        )


def _policy_folder(path: Path) -> tuple[Weights, str]:
    """In the Hugging Face layout, with our tokenizer."""
    from tidemill.models.hf import load_folder  # torch, which the supervisor would hold for the whole run

    try:
        return load_folder(path), path.name
    except ModelError as error:
        raise UsageError(f"start_from {path}: {error}") from error


def _run_folder(path: Path, folder: RunFolder) -> tuple[Weights, str]:
    """Version 0 of another run, and its corpus, which is copied."""
    other = RunFolder(path)
    run_id = other.info().run_id
    try:
        weights = FolderStore(other.store).load(0) if other.store.exists() else None
    except StoreError as error:
        raise UsageError(f"start_from {path} has no version 0 to start from: {error}") from error
    if weights is None:
        raise UsageError(f"start_from {path} has no version 0 to start from: it holds no store")
    if corpus_file(other).exists() and not corpus_file(folder).exists():
        aside = folder.path / ".corpus"
        shutil.copyfile(corpus_file(other), aside)
        os.replace(aside, corpus_file(folder))
    return weights, run_id


def start_weights(folder: RunFolder) -> Weights:
    """What `take_over` copied: bfloat16, so that the masters begin at exactly what was published."""
    return FolderStore(start_folder(folder)).load(0)
