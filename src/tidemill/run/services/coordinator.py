"""The coordinator's process: the journal, admission, and a port. No torch, no untrusted child."""

import asyncio
import os

from tidemill.batches.admission import AdmissionConfig
from tidemill.batches.coordinator import JournalCoordinator
from tidemill.batches.http import coordinator_server
from tidemill.batches.schema import Identity
from tidemill.run.services.context import Context
from tidemill.run.services.curriculum import demonstration_tasks, rl_tasks
from tidemill.run.supervisor import STARTS
from tidemill.tasks.folder import load

BACKUP_S = 600.0


async def serve(context: Context) -> None:
    recipe, rl = context.recipe, context.recipe.rl
    tasks = load(context.tasks)
    identity = Identity(
        run_id=context.info.run_id,
        recipe=context.info.recipe,
        seed=recipe.seed,
        sft_tasks=tuple(demonstration_tasks(tasks.tasks, recipe)),
        rl_tasks=tuple(rl_tasks(tasks.tasks, recipe)),
        config=AdmissionConfig(
            group_size=rl.group_size,
            groups_per_batch=rl.groups_per_batch,
            max_age=rl.max_age,
            num_updates=rl.num_updates,
            num_demonstrations_per_task=1,
            shuffled_rewards=rl.shuffled_rewards,
        ),
    )
    coordinator = JournalCoordinator(
        context.folder.journal, identity, blobs=context.blobs, store=context.store, events=context.events
    )
    if os.environ.get(STARTS) == "1":  # a new start of the run; after a crash of this service alone, a halt stands
        coordinator.clear_halt()
    server = coordinator_server(coordinator, context.folder.token(), port=context.ports[context.who])

    async def back_up() -> None:
        while True:
            await asyncio.sleep(BACKUP_S)
            try:
                await coordinator.backup(context.blobs)
            except OSError as error:  # a full disk must not take the journal's keeper away
                context.events.write("fault", note=f"backup: {error}")

    backups = asyncio.create_task(back_up())
    serving = asyncio.create_task(server.serve())
    try:
        await asyncio.wait({backups, serving}, return_when=asyncio.FIRST_COMPLETED)
        if backups.done():
            backups.result()
    finally:
        backups.cancel()
        server.should_exit = True
        await asyncio.wait({serving})
        coordinator.close()
    serving.result()
