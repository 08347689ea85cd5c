"""`tidemill tasks …` on the command line: opens the sandboxes, prints what the commands of `tasks` say."""

import argparse
import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from tidemill.core.errors import UsageError
from tidemill.core.seams import SandboxTier
from tidemill.run.services.rollouts import open_tier
from tidemill.tasks import commands
from tidemill.tasks.synth import SynthesisConfig


def synth_command(arguments: argparse.Namespace) -> int:
    if len(arguments.source) != 1:
        raise UsageError(f"{len(arguments.source)} sources: give one folder or one NAME==VERSION at a time")
    config = SynthesisConfig(seed=arguments.seed, max_per_package=arguments.max_tasks)
    out = Path(arguments.out)
    return _with_tier(arguments, lambda tier: commands.synth(arguments.source[0], out, tier, config, progress=print))


def check_command(arguments: argparse.Namespace) -> int:
    return _on_set(
        arguments, lambda folder, tier: commands.check_set(folder, tier, sample=arguments.sample, seed=arguments.seed)
    )


def show_command(arguments: argparse.Namespace) -> int:
    code, lines = commands.show(Path(arguments.tasks), arguments.task)
    print("\n".join(lines))
    return code


def solve_command(arguments: argparse.Namespace) -> int:
    return _on_set(arguments, lambda folder, tier: commands.solve(folder, arguments.task, tier))


def _on_set(arguments: argparse.Namespace, act: Callable[[Path, SandboxTier], Awaitable[commands.Result]]) -> int:
    """`act` on a task set folder; of a manifest, on a set that is made from it for the occasion."""
    path = Path(arguments.tasks)
    if path.suffix != ".json":
        return _with_tier(arguments, lambda tier: act(path, tier))

    async def unpacked(tier: SandboxTier) -> commands.Result:
        with tempfile.TemporaryDirectory(prefix="tidemill-tasks-") as aside:
            await commands.unpack(path, Path(aside, "set"), tier)
            return await act(Path(aside, "set"), tier)

    return _with_tier(arguments, unpacked)


def _with_tier(arguments: argparse.Namespace, act: Callable[[SandboxTier], Awaitable[commands.Result]]) -> int:
    async def whole() -> commands.Result:
        tier = open_tier(arguments.tier, "command")
        tier.reap()
        try:
            return await act(tier)
        finally:
            await tier.close()

    code, lines = asyncio.run(whole())
    print("\n".join(lines))
    return code
