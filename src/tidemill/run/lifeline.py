"""A task that needs a thread beside it, such as an engine's, does not outlive it (law 11)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def lifeline() -> AsyncIterator[Callable[[BaseException], None]]:
    """Yields what such a thread calls, from itself, when it dies: the block is cancelled, and ends with that error.

    So it does where the block failed first, of what the death led to. A cancellation from elsewhere stays one.
    """
    deaths: list[BaseException] = []
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    assert me is not None
    is_open = True

    def end() -> None:
        if is_open:
            me.cancel()

    def died(error: BaseException) -> None:
        deaths.append(error)
        if deaths[0] is error:  # what a second one would interrupt is the cleaning up after the first
            loop.call_soon_threadsafe(end)

    try:
        yield died
    except (Exception, asyncio.CancelledError):
        if not deaths:
            raise
    finally:
        is_open = False
    if deaths:
        raise deaths[0]
