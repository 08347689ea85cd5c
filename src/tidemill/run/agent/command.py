"""`tidemill agent`: a run's policy on a folder of the user's own."""

import argparse
import asyncio
import sys
from pathlib import Path

from tidemill.core.errors import UsageError
from tidemill.episodes.mend import TOOLS
from tidemill.run.agent.mending import Mended, Order, mend
from tidemill.run.agent.patch import apply, unified_diff
from tidemill.run.lifeline import lifeline
from tidemill.run.policy import Policy, open_policy
from tidemill.run.services.rollouts import open_tier
from tidemill.text.terminal import printable


def agent_command(arguments: argparse.Namespace) -> int:
    """0 where the folder's fault was mended, 1 where it was not."""
    order = Order(
        repo=Path(arguments.repo),
        file=arguments.file,
        function=arguments.function,
        test=arguments.test,
        requires=tuple(arguments.requires or ()),
        tries=arguments.tries,
        seed=arguments.seed,
    )
    if not order.repo.is_dir():
        raise UsageError(f"--repo {arguments.repo!r} is no folder: give one with a Python package and its tests")
    policy = open_policy(arguments.run, arguments.version)
    tell(f"policy    version {policy.version} of {policy.folder.path}")
    tell(f"harness   {policy.harness_line(TOOLS)}")
    mended = asyncio.run(_mend(order, policy, arguments.tier))
    if mended is None:
        tell(f"not mended in {order.tries} tries: more --tries, another --function, or a longer run may do")
        return 1
    show(mended)
    if not arguments.apply:
        tell("nothing was written; --apply writes it")
        return 0
    apply(order.repo, mended.path, mended.before, mended.after)
    tell(f"wrote {mended.path}")
    return 0


async def _mend(order: Order, policy: Policy, tier_name: str) -> Mended | None:
    import torch  # seconds, which a wrong argument need not wait for

    from tidemill.engines.batcher import EngineConfig
    from tidemill.engines.embedded import EmbeddedEngine

    torch.set_num_threads(1)  # as in training
    config = EngineConfig(name="agent-0", num_slots=1, context_tokens=policy.recipe.policy.max_context_tokens)
    tier = open_tier(tier_name, "agent")
    async with lifeline() as died:
        engine = EmbeddedEngine(config, on_death=died)
        try:
            tier.reap()
            engine.swap(policy.version, policy.weights)
            return await mend(order, policy, engine, tier, tell)
        finally:
            await tier.close()
            await engine.close()


def show(mended: Mended) -> None:
    """The diff on standard output: as it is for a pipe, printable on a terminal."""
    diff = unified_diff(mended.path, mended.before.decode("utf-8"), mended.after.decode("utf-8"))
    if sys.stdout.isatty():
        diff = printable(diff.replace("\r\n", "\n"))
    print(diff, end="", flush=True)


def tell(line: str) -> None:
    print(printable(line), flush=True)
