"""A worker's process: harness, sandboxes, grading. No torch. Its episodes are untrusted; it is not."""

import asyncio
import uuid
from contextlib import suppress

from tidemill.core.errors import EngineError, EngineUnavailable
from tidemill.core.records import Attempt, AttemptResult
from tidemill.engines.client import Fleet, HttpEngine
from tidemill.episodes.results import fault_result
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
        try:
            return (await rollouts.play(lease))[1]
        except (EngineError, OSError):  # a broken contract, a full disk: the process's own affair
            raise
        except Exception as error:  # the boundary of an episode: one task must not end the others
            reason = f"{type(error).__name__}: {error}"
            context.events.write("fault", ids={"attempt": lease.id, "task": lease.task_id}, note=reason)
            return fault_result(lease, reason)

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
        await rollouts.workshop.tier.close()
        await fleet.close()
        await coordinator.close()
