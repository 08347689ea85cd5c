"""Asynchronous against synchronous: the same episodes on the same cores, bound 2 and bound 0, from the same start.

`python benchmarks/staleness.py [UPDATES]` runs the quickstart with a short pre-training twice, one after the other,
and prints the wall time of the RL stage by its events.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tidemill.core.events import read_events

ROOT = Path(__file__).parents[1]


def rl_seconds(folder: Path) -> float:
    """From the publication of version 0 to that of the last."""
    published = sorted(event.to_s for event in read_events(folder / "events") if event.what == "publish")
    return published[-1] - published[0]


def main() -> None:
    num_updates = sys.argv[1] if len(sys.argv) > 1 else "8"
    walls: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="tidemill-staleness-") as aside:
        for max_age in ("2", "0"):
            out = Path(aside, max_age)
            command = [
                sys.executable,
                "-m",
                "tidemill.run.cli",
                "run",
                str(ROOT / "recipes/quickstart.py"),
                "--out",
                str(out),
            ]
            command += ["--rl.num-updates", num_updates, "--rl.max-age", max_age, "--pretraining.num-steps", "200"]
            command += ["--demonstrations.num-steps", "40", "--evaluation.every", "1000", "--evaluation.num-tasks", "1"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            walls[max_age] = rl_seconds(out)
            print(f"bound {max_age}: {walls[max_age]:.1f} s for {num_updates} updates", flush=True)
    print(f"asynchronous is {walls['0'] / walls['2']:.2f} times as fast")


if __name__ == "__main__":
    main()
