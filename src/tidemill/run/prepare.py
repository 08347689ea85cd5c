"""What is made once, before the services start: task set, corpus, tokenizer. Each is there whole, or not at all."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tidemill.core.errors import TaskError
from tidemill.core.seams import SandboxTier
from tidemill.run.config import Recipe
from tidemill.run.folder import RunFolder
from tidemill.run.pretraining import load_corpus, read_code, save_corpus, train_tokenizer
from tidemill.run.services.context import corpus_file, tasks_folder, tokenizer_folder
from tidemill.run.start import refuse_leak, take_over
from tidemill.tasks.check import check
from tidemill.tasks.folder import TaskSet, load
from tidemill.tasks.layout import module_name
from tidemill.tasks.manifest import load_manifest, split_of
from tidemill.tasks.materialize import fetch_materials, materialize
from tidemill.tasks.vault import FolderVault

Say = Callable[[str], None]


async def prepare(
    folder: RunFolder, recipe: Recipe, tier: SandboxTier, *, source: Path, start: Path | None, say: Say
) -> None:
    """Idempotent: what an earlier start has made stands. `source` is the recipe's task manifest or task set folder,
    `start` what `Recipe.start_from` names."""
    tasks_path = tasks_folder(folder)
    if not tasks_path.exists():
        say(f"tasks: {source}")
        aside = folder.path / ".tasks-unchecked"
        shutil.rmtree(aside, ignore_errors=True)
        if source.suffix == ".json":
            await materialize(load_manifest(source), aside, tier)
        else:
            load(source)
            await asyncio.to_thread(shutil.copytree, source, aside)
        await _validate(load(aside), recipe, tier, say)
        os.rename(aside, tasks_path)
    if not tokenizer_folder(folder).exists() and start is not None:
        say(f"policy and tokenizer: those of {start}")
        if tasks_folder(RunFolder(start)).exists():
            refuse_leak(load(tasks_path), load(tasks_folder(RunFolder(start))))
        await asyncio.to_thread(take_over, folder, recipe, start)
    has_tokenizer = tokenizer_folder(folder).exists()
    if not corpus_file(folder).exists() and (recipe.pretraining.num_steps or not has_tokenizer):
        say("corpus: reading this machine's Python files")
        own, held_out = sources_by_split(source, load(tasks_path))
        corpus = read_code(recipe.pretraining, own=own, held_out=held_out, seed=recipe.seed)
        save_corpus(corpus, corpus_file(folder))
    if not has_tokenizer:
        corpus = load_corpus(corpus_file(folder))
        num_chars = sum(len(function.source) for function in corpus)
        say(f"corpus: {len(corpus)} functions, {num_chars / 1e6:.1f} MB; training the tokenizer")
        tokenizer = await asyncio.to_thread(train_tokenizer, corpus, recipe.policy.vocab_size)
        with_name = Path(tempfile.mkdtemp(dir=folder.path, prefix=".tokenizer-"))
        tokenizer.save(with_name)
        os.rename(with_name, tokenizer_folder(folder))


def sources_by_split(source: Path, tasks: TaskSet) -> tuple[list[tuple[str, str]], list[str]]:
    """Files (name, source) of the packages' training modules, and whole files of modules that the policy is examined
    on: healthy from the packages, faulty from the workspaces."""
    own: list[tuple[str, str]] = []
    held_out: list[str] = []
    for task in tasks.tasks:
        if task.split != "train" and "path" in task.data:
            held_out += [
                file.data.decode("utf-8", "replace")
                for file in tasks.workspace(task).files
                if file.path == task.data["path"]
            ]
    if source.suffix == ".json":
        manifest = load_manifest(source)
        for _, layout in fetch_materials(manifest.packages):
            for path, text in layout.sources.items():
                if split_of(module_name(path), manifest.split_seed) == "train":
                    own.append((path, text))
                else:
                    held_out.append(text)
    return own, list(dict.fromkeys(held_out))


async def _validate(tasks: TaskSet, recipe: Recipe, tier: SandboxTier, say: Say) -> None:
    if recipe.num_validated_tasks == 0:
        return
    vault = FolderVault(tasks.folder / "vault")
    findings = await check(tasks, vault, tier, sample=recipe.num_validated_tasks, seed=recipe.seed)
    if findings:
        raise TaskError(f"task {findings[0].task_id} is not sound: {findings[0].problem} (tidemill tasks check)")
    say(f"tasks: {len(tasks.tasks)}, of which {min(recipe.num_validated_tasks, len(tasks.tasks))} were validated again")
