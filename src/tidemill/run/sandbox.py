"""`tidemill sandbox run`: one command where episodes run theirs."""

import argparse
import asyncio
import sys
from pathlib import Path

from tidemill.core.errors import UsageError
from tidemill.core.records import Tree, TreeFile
from tidemill.core.seams import ExecResult, SandboxLimits
from tidemill.run.services.rollouts import open_tier
from tidemill.tasks.manifest import layer_of
from tidemill.tasks.packages import read_repository


def run_command(arguments: argparse.Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise UsageError("no command: give one after --, such as `tidemill sandbox run -- python3 -c 'print(1)'`")
    tree = Tree(files=())
    if arguments.repo:
        files = read_repository(Path(arguments.repo))
        tree = Tree(files=tuple(TreeFile(path=path, data=data) for path, data in sorted(files.items())))
    result = asyncio.run(_run(arguments, command, tree))
    sys.stdout.buffer.write(result.stdout)
    sys.stderr.buffer.write(result.stderr)
    sys.stdout.flush()
    print(
        f"[{arguments.tier}] {result.status}, exit code {result.exit_code}, {result.wall_s:.2f} s, "
        f"{result.cpu_s:.2f} CPU-s",
        file=sys.stderr,
    )
    return 0 if result.status == "ok" and result.exit_code == 0 else 1


async def _run(arguments: argparse.Namespace, command: list[str], tree: Tree) -> ExecResult:
    tier = open_tier(arguments.tier, "command")
    tier.reap()
    try:
        sandbox = await tier.open(tree, layer_of(), SandboxLimits())
        try:
            return await sandbox.run(command, timeout_s=arguments.timeout_s)
        finally:
            await sandbox.close()
    finally:
        await tier.close()
