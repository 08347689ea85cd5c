"""`python -m tidemill.run.services RUN WHO PORTS`: one service, to its end.

| exit code      | means                                                                       |
|----------------|-----------------------------------------------------------------------------|
| 0              | its work is done                                                            |
| STOPPED        | it was asked to stop; whoever did not mean the whole run gets it back       |
| HALT_EXIT_CODE | the run must halt, with the cause in RUN/halted: starting again mends nothing |
| 1              | it failed; the last line of its log says why, and it is started again        |
"""

import asyncio
import importlib
import json
import signal
import sys
import traceback
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from tidemill.core.errors import (
    ModelError,
    RunFolderError,
    SandboxUnavailable,
    TaskError,
    TrainingHalted,
    UsageError,
)
from tidemill.run.folder import RunFolder
from tidemill.run.keeper import end_with_supervisor
from tidemill.run.services.context import open_context
from tidemill.run.supervisor import HALT_EXIT_CODE

STOPPED = 143
PERMANENT = (TrainingHalted, UsageError, RunFolderError, ModelError, TaskError, SandboxUnavailable)


def main() -> None:
    path, who, ports = sys.argv[1:]
    end_with_supervisor()
    try:
        context = open_context(Path(path), who, json.loads(ports))
        service = importlib.import_module(f"tidemill.run.services.{who.rpartition('-')[0]}")
        context.events.write("start")
        was_stopped = asyncio.run(_until_stopped(service.serve(context)))
        context.events.write("stop")
    except Exception as error:  # the process's boundary
        cause = _cause(error)
        note = f"{type(cause).__name__}: {cause}"
        traceback.print_exception(error)
        print(note, file=sys.stderr)  # last: the supervisor quotes the last line
        if isinstance(cause, PERMANENT):
            RunFolder(Path(path)).write_halt(str(cause))
            sys.exit(HALT_EXIT_CODE)
        sys.exit(1)
    sys.exit(STOPPED if was_stopped else 0)


async def _until_stopped(service: Coroutine[Any, Any, None]) -> bool:
    """True where SIGTERM or SIGINT ended it: the service is cancelled, so that it closes what it holds."""
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
    return stopped


def _cause(error: BaseException) -> BaseException:
    """Of a group, the failure that no restart mends, if there is one; else the first."""
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if isinstance(leaf, PERMANENT)), leaves[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


if __name__ == "__main__":
    main()
