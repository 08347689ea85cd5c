"""A run that starts from another one's version 0: tokenizer, corpus and policy are copied, and the other left alone."""

import os
import shutil
import tempfile
from pathlib import Path

from tidemill.core.errors import StoreError, UsageError
from tidemill.core.seams import Weights
from tidemill.deltas.store import FolderStore
from tidemill.models.config import config_from_hf
from tidemill.run.config import Recipe
from tidemill.run.folder import RunFolder
from tidemill.run.services.context import corpus_file, model_config, tokenizer_folder
from tidemill.text.tokenizer import Tokenizer


def start_folder(folder: RunFolder) -> Path:
    """A store of one version: what the run began with."""
    return folder.path / "start"


def take_over(folder: RunFolder, recipe: Recipe, other: RunFolder) -> None:
    """Copy what `recipe.start_from` names. Idempotent: the tokenizer comes last, and with it all is there.

    Raises `UsageError` where `other` has published nothing, or where its policy has another shape than the recipe's.
    """
    if other.path == folder.path:
        raise UsageError(f"start_from is {other.path}, this run's own folder: give that of another run")
    other.info()
    try:
        weights = FolderStore(other.store).load(0) if other.store.exists() else None
    except StoreError as error:
        raise UsageError(f"start_from {other.path} has no version 0 to start from: {error}") from error
    if weights is None:
        raise UsageError(f"start_from {other.path} has no version 0 to start from: it holds no store")
    tokenizer = Tokenizer.from_files(weights.tokenizer)
    wanted, found = model_config(recipe.policy, tokenizer.vocab_size), config_from_hf(weights.config)
    if wanted != found:
        names = [name for name in vars(found) if getattr(found, name) != getattr(wanted, name)]
        told = ", ".join(f"{name} {getattr(found, name)}, not {getattr(wanted, name)}" for name in names)
        raise UsageError(f"the policy of {other.path} has {told}: put its shape into the recipe's `policy`")
    if corpus_file(other).exists() and not corpus_file(folder).exists():
        aside = folder.path / ".corpus"
        shutil.copyfile(corpus_file(other), aside)
        os.replace(aside, corpus_file(folder))
    store = FolderStore(start_folder(folder))
    store.publish(weights, version=0, batch=None, step=0, run_id=other.info().run_id)
    whole = Path(tempfile.mkdtemp(dir=folder.path, prefix=".tokenizer-"))
    tokenizer.save(whole)
    os.rename(whole, tokenizer_folder(folder))


def start_weights(folder: RunFolder) -> Weights:
    """What `take_over` copied: bfloat16, so that the masters begin at exactly what was published."""
    return FolderStore(start_folder(folder)).load(0)
