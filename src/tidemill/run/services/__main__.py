"""`python -m tidemill.run.services RUN WHO PORTS`: one service, to its end.

Exit codes: 0 its work is done, or it was asked to stop; 3 the run must halt, with the cause in RUN/halted.
"""

import asyncio
import importlib
import json
import signal
import sys
from pathlib import Path

from tidemill.core.errors import TrainingHalted
from tidemill.run.keeper import end_with_supervisor
from tidemill.run.services.context import Context, open_context
from tidemill.run.supervisor import HALT_EXIT_CODE


def main() -> None:
    path, who, ports = sys.argv[1:]
    end_with_supervisor()
    context = open_context(Path(path), who, json.loads(ports))
    service = importlib.import_module(f"tidemill.run.services.{who.rpartition('-')[0]}")
    context.events.write("start")
    try:
        asyncio.run(_until_stopped(service.serve(context), context))
    except* TrainingHalted as group:
        cause = _first(group)
        context.folder.write_halt(str(cause))
        context.events.write("fault", note=str(cause))
        print(f"halted: {cause}", file=sys.stderr)
        sys.exit(HALT_EXIT_CODE)
    context.events.write("stop")


async def _until_stopped(service: "asyncio.Future[None]", context: Context) -> None:
    """The service, cancelled by SIGTERM or SIGINT so that it closes what it holds."""
    task = asyncio.ensure_future(service)
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            raise


def _first(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    main()
