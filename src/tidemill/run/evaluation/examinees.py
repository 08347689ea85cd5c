"""From the command line to a player: a checkpoint in an engine of our own, a scripted agent, an endpoint."""

import argparse
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.core.errors import UsageError
from tidemill.core.seams import Environment
from tidemill.episodes.chat import NAME as CHAT
from tidemill.episodes.chat_client import ChatClient
from tidemill.run.evaluation.players import ChatPlayer, Player, PolicyPlayer, ScriptedPlayer
from tidemill.run.evaluation.results import About
from tidemill.run.folder import RunFolder
from tidemill.run.lifeline import lifeline
from tidemill.run.policy import open_version
from tidemill.tasks.commands import window
from tidemill.tasks.folder import TaskSet
from tidemill.text.compact import CompactRenderer
from tidemill.text.tokenizer import Tokenizer

AGENT_VOCABULARY = 2048
"""Of the tokenizer in which a scripted agent speaks: about that of a small policy."""


@dataclass(frozen=True, kw_only=True)
class Examinee:
    """Who is examined, and how the rest is chosen where the command line leaves it open."""

    name: str
    about: About
    player: Callable[[TaskSet], Player]
    """For tasks of this set."""
    renderer: str = CompactRenderer.name
    seed: int = 0
    max_window_lines: int | None = None
    environments: Mapping[str, Callable[[], Environment]] = field(default_factory=dict)


def examinee(arguments: argparse.Namespace) -> AbstractAsyncContextManager[Examinee]:
    """To be entered inside the event loop that plays. Raises `UsageError`, `EngineError`, `StoreError`."""
    if arguments.checkpoint is not None:
        return _checkpoint(arguments)
    if arguments.endpoint is not None:
        return _endpoint(arguments)
    return _agent(arguments)


def run_and_version(checkpoint: str) -> tuple[RunFolder, int | None]:
    """`RUN_DIR` or `RUN_DIR@VERSION`. Raises `RunFolderError` where there is no run."""
    path, _, version = checkpoint.rpartition("@")
    if not (path and version.isdigit()):
        path, version = checkpoint, ""
    folder = RunFolder(Path(path))
    folder.info()
    return folder, int(version) if version else None


@asynccontextmanager
async def _checkpoint(arguments: argparse.Namespace) -> AsyncIterator[Examinee]:
    folder, wanted = run_and_version(arguments.checkpoint)
    policy = open_version(folder, wanted, named=f"{folder.path.name}@")
    version, recipe = policy.version, policy.recipe
    import torch

    from tidemill.engines.batcher import EngineConfig
    from tidemill.engines.embedded import EmbeddedEngine

    torch.set_num_threads(1)  # small policies are slower with more: see docs/log.md
    config = EngineConfig(name="evaluation", num_slots=arguments.slots, context_tokens=recipe.policy.max_context_tokens)
    temperature = recipe.rl.temperature if arguments.temperature is None else arguments.temperature
    async with lifeline() as died:
        engine = EmbeddedEngine(config, on_death=died)
        try:
            engine.swap(version, policy.weights)
            yield Examinee(
                name=f"{folder.path.name}@{version}",
                player=lambda tasks: PolicyPlayer(
                    engine, policy.tokenizer, recipe, version=version, temperature=temperature
                ),
                about={"run_id": folder.info().run_id, "version": version, "temperature": temperature},
                seed=recipe.seed,
                max_window_lines=recipe.max_window_lines,
                environments=recipe.environments,
            )
        finally:
            await engine.close()


@asynccontextmanager
async def _endpoint(arguments: argparse.Namespace) -> AsyncIterator[Examinee]:
    key = None
    if arguments.api_key_env is not None:
        key = os.environ.get(arguments.api_key_env)
        if not key:
            raise UsageError(f"--api-key-env names {arguments.api_key_env}, which is not set: export it first")
    temperature = 1.0 if arguments.temperature is None else arguments.temperature
    client = ChatClient(arguments.endpoint, model=arguments.model or "", api_key=key)
    try:
        if not client.model:
            served = await client.models()
            if len(served) != 1:
                raise UsageError(f"{client.endpoint} serves {', '.join(served[:8]) or 'nothing'}: choose with --model")
            client.model = served[0]
        limits = {"max_sampled_tokens": arguments.max_sampled_tokens, "wall_s": arguments.wall_s}
        yield Examinee(
            name=client.model,
            player=lambda tasks: ChatPlayer(client, temperature=temperature, **limits),
            renderer=CHAT,
            about={"endpoint": client.endpoint, "temperature": temperature, **limits},
        )
    finally:
        await client.close()


@asynccontextmanager
async def _agent(arguments: argparse.Namespace) -> AsyncIterator[Examinee]:
    def player(tasks: TaskSet) -> Player:
        texts = ["\n".join(window(tasks, task)) for task in tasks.tasks if "last_line" in task.data]
        return ScriptedPlayer(arguments.agent, Tokenizer.train(texts, AGENT_VOCABULARY))

    yield Examinee(name=arguments.agent, player=player, about={})
