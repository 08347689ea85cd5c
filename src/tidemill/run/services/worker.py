"""A worker's process: harness, sandboxes, grading. No torch. Its episodes are untrusted; it is not."""

import asyncio
import uuid
from contextlib import suppress

from tidemill.core.errors import EngineUnavailable
from tidemill.core.records import Attempt, AttemptResult
from tidemill.engines.client import Fleet, HttpEngine
from tidemill.run.loops import POLL_S, work
from tidemill.run.services.context import Context
from tidemill.run.services.rollouts import open_rollouts

RENEW_S = 10.0


async def serve(context: Context) -> None:
    token = context.folder.token()
    engines = [who for who in context.ports if who.startswith("engine-")]
    fleet = Fleet([HttpEngine(context.url(who), token) for who in engines])
    rollouts = await open_rollouts(context, fleet)
    coordinator = context.coordinator()

    newest = -1

    async def attempt(lease: Attempt) -> AttemptResult:
        """The engine may still be loading the version that this work was issued at: older tokens would age too soon."""
        nonlocal newest
        while lease.stage == "rl" and newest < lease.min_version:
            with suppress(EngineUnavailable):
                newest = (await fleet.status()).version
            if newest < lease.min_version:
                await asyncio.sleep(POLL_S)
        return (await rollouts.play(lease))[1]

    try:
        await work(
            coordinator,
            attempt,
            worker=context.who,
            instance=uuid.uuid4().hex,
            num_slots=context.recipe.rollouts.num_slots,
            renew_s=RENEW_S,
            events=context.events,
        )
    finally:
        await rollouts.tier.close()
        await fleet.close()
        await coordinator.close()
