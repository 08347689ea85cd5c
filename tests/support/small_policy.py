"""A run folder that holds a tiny policy which no training has touched, as `tidemill agent` opens it."""

from pathlib import Path

from support.small_repository import RECIPE
from support.synthetic_policy import random_weights
from tidemill.deltas.store import FolderStore
from tidemill.run.folder import RunFolder
from tidemill.run.services.context import overrides_file, recipe_file
from tidemill.text.tokenizer import Tokenizer


def small_policy_run(path: Path, *, num_versions: int = 2) -> RunFolder:
    """Versions 0 to `num_versions` − 1 are published; no episode was played."""
    folder = RunFolder(path)
    folder.prepare(recipe="a" * 64, recipe_name="small")
    recipe_file(folder).write_text(RECIPE)
    overrides_file(folder).write_text("[]")
    tokenizer = Tokenizer.train([RECIPE] * 3, 512)
    for version in range(num_versions):
        FolderStore(folder.store).publish(
            random_weights(tokenizer, seed=1, version=version),
            version=version,
            batch=None if version == 0 else "b" * 64,
            step=version + 1,
            run_id=folder.info().run_id,
        )
    return folder
