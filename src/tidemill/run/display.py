"""What a terminal shows of a run: one view that is drawn again and again, or plain lines where that cannot be.

The view takes the terminal's other screen, so that a resize leaves nothing behind, and gives the first one back with
the last view on it, however the run ends. Nothing here may stop a run: a view that fails gives way to plain lines.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import final

from rich.console import Console, RenderableType
from rich.live import Live

from tidemill.reports.live.facts import Follower
from tidemill.reports.live.screen import screen
from tidemill.run.config import Recipe
from tidemill.run.folder import RunFolder
from tidemill.run.progress import Progress

LOOK_EVERY_S = 1.0
MAX_CPU_SHARE = 0.01
"""Of one core: where looking and drawing cost more, they are done less often."""
Tick = Callable[[], None]


def can_draw() -> bool:
    """Whether standard output is a terminal that takes more than plain lines."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown") and encoding == "utf8"


@contextmanager
def display(folder: RunFolder, recipe: Recipe, say: Progress, *, plain: bool) -> Iterator[Tick]:
    """Yields what to call about every second while a run goes on: it draws, or prints what is new."""
    if plain or not can_draw():
        yield say.tick
        say.tick()
        return
    totals = {"cpt": recipe.pretraining.num_steps, "sft": recipe.demonstrations.num_steps, "rl": recipe.rl.num_updates}
    follower = Follower(folder.path, run_id=folder.info().run_id, totals=totals)
    is_over = False

    def look(width: int) -> RenderableType:
        return screen(follower.look(is_over=is_over), width=width, now_s=time.time())

    with LiveView(look, say) as view:
        try:
            yield view.tick
        finally:
            is_over = folder.owner() == os.getpid()


@final
class LiveView:
    """Draws what `look` returns for a width, in columns. To be entered and ticked in the main thread: no thread draws
    beside it, because processes are forked there."""

    def __init__(
        self, look: Callable[[int], RenderableType], say: Progress, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look = look
        self._say = say
        self._clock = clock
        self._console = Console()
        self._live: Live | None = None
        self._due_s = 0.0
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> "LiveView":
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._catch_signals()
        self._live.start()
        self.tick()
        return self

    def __exit__(self, *_: object) -> None:
        was_live = self._live is not None
        self._leave()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if was_live:
            with suppress(Exception):  # the terminal may be gone; what ended the run is told by others
                self._console.print(self._look(self._console.width))

    def tick(self) -> None:
        """Draw, if it is time to. Never raises for a failure of its own."""
        if self._live is None:
            self._say.tick()
            return
        if self._clock() < self._due_s:
            return
        before_s = time.thread_time()
        try:
            self._live.update(self._look(self._console.width), refresh=True)
        except Exception as error:  # the boundary of the view
            self._leave()
            self._say(f"the live view failed ({type(error).__name__}: {error}); plain lines from here on")
            return
        cost_s = time.thread_time() - before_s
        self._due_s = self._clock() + max(LOOK_EVERY_S * 0.9, cost_s / MAX_CPU_SHARE)

    def _leave(self) -> None:
        """Give the terminal back as it was."""
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):  # it is gone
                live.stop()

    # --- signals ---------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        """End by an exception where the default would end the process with the terminal in the other screen."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in (
            (signal.SIGTERM, _end),
            (signal.SIGHUP, _end),
            (signal.SIGTSTP, self._suspend),
        ):
            if signal.getsignal(number) == signal.SIG_DFL:  # one that is ignored, as under nohup, stays so
                self._handlers[number] = signal.signal(number, handler)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: to the shell with a whole terminal, and back."""
        if self._live is not None:
            self._live.stop()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)
        if self._live is not None:
            self._live.start(refresh=True)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
