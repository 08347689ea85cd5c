"""An engine's process: a policy, moved from version to version as the store brings them, behind a port."""

import asyncio
from contextlib import suppress

import uvicorn

from tidemill.core.errors import EngineUnavailable
from tidemill.engines.batcher import EngineConfig
from tidemill.engines.embedded import EmbeddedEngine
from tidemill.engines.follower import Follower
from tidemill.engines.http import engine_app
from tidemill.run.lifeline import lifeline
from tidemill.run.services.context import Context


def engine_config(context: Context) -> EngineConfig:
    rollouts = context.recipe.rollouts
    return EngineConfig(
        name=context.who,
        num_slots=rollouts.num_slots * rollouts.num_workers,
        context_tokens=context.recipe.policy.max_context_tokens,
        swap_mode=rollouts.kv_policy,
    )


async def serve(context: Context) -> None:
    async with lifeline() as died:
        engine = EmbeddedEngine(engine_config(context), on_death=died)
        follower = Follower(context.store, engine, context.events, on_death=died)
        follower.start()
        server = uvicorn.Server(
            uvicorn.Config(
                engine_app(engine, context.folder.token()),
                host="127.0.0.1",
                port=context.ports[context.who],
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=2,
            )
        )
        serving = asyncio.create_task(server.serve())
        try:
            await asyncio.wait({serving})
        finally:
            server.should_exit = True
            await asyncio.wait({serving})
            with suppress(EngineUnavailable):
                status = await engine.status()
                context.events.write(
                    "served",
                    version=status.version,
                    numbers={"prefill_tokens": status.prefill_tokens, "sampled_tokens": status.sampled_tokens},
                )
            follower.close()
            await engine.close()
        serving.result()
