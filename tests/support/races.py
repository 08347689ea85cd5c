"""Threads that publish the same version at the same moment."""

import threading
from collections.abc import Callable

from tidemill.core.errors import VersionTaken


def race(publish: Callable[[int], object], num: int) -> list[str]:
    """Call `publish` with 0 … `num` − 1, each in a thread of its own, at once; "won" or "taken" of each, sorted."""
    start, outcomes = threading.Barrier(num), list[str]()

    def run(seed: int) -> None:
        start.wait(timeout=30)
        try:
            publish(seed)
            outcomes.append("won")
        except VersionTaken:
            outcomes.append("taken")

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return sorted(outcomes)
