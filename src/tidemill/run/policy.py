"""The policy of a run, as it is asked for by its user: a published version, and how it was trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tidemill.core.blobs import FolderBlobs, get_record
from tidemill.core.errors import BlobError, RunFolderError, StoreError, UsageError
from tidemill.core.journal import read_journal
from tidemill.core.records import Episode
from tidemill.core.seams import ToolSpec, Weights
from tidemill.deltas.store import FolderStore
from tidemill.episodes.conduct import harness_hash
from tidemill.run.config import Recipe
from tidemill.run.folder import RunFolder
from tidemill.run.services.context import saved_recipe
from tidemill.text.compact import CompactRenderer
from tidemill.text.tokenizer import Tokenizer

RUNS = Path("runs")
"""Where `tidemill run` puts runs, relative to where it is called."""


@final
@dataclass(frozen=True, kw_only=True)
class Policy:
    folder: RunFolder
    version: int
    weights: Weights
    recipe: Recipe
    tokenizer: Tokenizer

    def renderer(self) -> CompactRenderer:
        return CompactRenderer(self.tokenizer)

    def harness_line(self, tools: Sequence[ToolSpec]) -> str:
        """Whether the harness of now is that of its training, in words."""
        trained = trained_harness(self.folder)
        now = harness_hash(tools, self.renderer().name)
        if trained is None:
            return f"{now[:12]}; what it was trained in is not known: the run has no episode"
        if trained != now:
            return f"{now[:12]}, but it was trained in {trained[:12]}: use the Tidemill that trained it, or train again"
        return f"{now[:12]}, as in training"


def open_version(folder: RunFolder, version: int | None, *, named: str) -> Policy:
    """That version, or the newest one; `named`: what stands before its number on the command line.

    Raises `UsageError` where there is no run, or no such version.
    """
    try:
        folder.info()
        recipe = saved_recipe(folder)
    except (RunFolderError, FileNotFoundError) as error:
        raise UsageError(f"{error}: give the --out folder of a `tidemill run`") from error
    head = FolderStore(folder.store).head() if folder.store.is_dir() else None
    if head is None:
        raise UsageError(f"{folder.path} has published no version yet: wait for version 0, or give another run")
    chosen = head if version is None else version
    if not 0 <= chosen <= head:
        raise UsageError(f"{folder.path} has no version {chosen}: give {named}0 to {head}")
    try:
        weights = FolderStore(folder.store).load(chosen)
        tokenizer = Tokenizer.from_files(weights.tokenizer)
    except (StoreError, ValueError) as error:
        raise UsageError(f"version {chosen} of {folder.path} cannot be used: {error}") from error
    return Policy(folder=folder, version=chosen, weights=weights, recipe=recipe, tokenizer=tokenizer)


def open_policy(path: str | None, version: int | None) -> Policy:
    """Of `tidemill agent --run PATH --version N`. Raises `UsageError`."""
    folder = RunFolder(Path(path)) if path is not None else newest_run(RUNS)
    return open_version(folder, version, named="--version ")


def newest_run(runs: Path) -> RunFolder:
    """The run that published last. Raises `UsageError` where there is none."""
    found = list(runs.glob("*/store/versions/[0-9]*.json"))
    if not found:
        raise UsageError(
            f"no run in {runs.resolve()} has published a version: give --run DIR, or train one (make demo)"
        )
    return RunFolder(max(found, key=lambda path: path.stat().st_mtime).parents[2])


def trained_harness(folder: RunFolder) -> str | None:
    """Of the newest episode that the run keeps."""
    if not folder.journal.exists():
        return None
    rows = [row for row in read_journal(folder.journal).attempts if row.episode is not None]
    for row in sorted(rows, key=lambda row: row.done_at_s or 0.0, reverse=True)[:3]:
        try:
            return get_record(FolderBlobs(folder.blobs), row.episode or "", Episode).harness_hash
        except BlobError:
            continue
    return None
