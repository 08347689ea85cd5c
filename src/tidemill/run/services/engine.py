"""An engine's process: a policy, moved from version to version as the store brings them, behind a port."""

import os
import signal

import uvicorn

from tidemill.engines.batcher import EngineConfig
from tidemill.engines.embedded import EmbeddedEngine
from tidemill.engines.follower import Follower
from tidemill.engines.http import engine_app
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
    deaths: list[BaseException] = []

    def died(error: BaseException) -> None:
        deaths.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

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
    try:
        await server.serve()
    finally:
        status = await engine.status()
        context.events.write(
            "served",
            version=status.version,
            numbers={"prefill_tokens": status.prefill_tokens, "sampled_tokens": status.sampled_tokens},
        )
        follower.close()
        await engine.close()
    if deaths:
        raise deaths[0]
