"""What an episode costs in CPU-seconds, without the model, stage by stage: `python benchmarks/episode_cost.py RUN`."""

import sys
from pathlib import Path
from statistics import mean, median

from tidemill.core.blobs import FolderBlobs, get_record
from tidemill.core.journal import read_journal
from tidemill.core.records import Episode


def main() -> None:
    run = Path(sys.argv[1])
    blobs = FolderBlobs(run / "blobs")
    names = [row.episode for row in read_journal(run / "journal.sqlite").attempts if row.episode]
    episodes = [get_record(blobs, name, Episode) for name in names]
    costs = [episode.cpu_s for episode in episodes if episode.stage == "rl"]
    print(f"{len(costs)} episodes of RL in {run}; CPU-seconds")
    for stage in sorted({stage for cost in costs for stage in cost}):
        values = [cost.get(stage, 0.0) for cost in costs]
        print(f"  {stage:<14} mean {mean(values):.3f}  median {median(values):.3f}  max {max(values):.3f}")
    totals = [sum(cost.values()) for cost in costs]
    print(f"  {'all':<14} mean {mean(totals):.3f}  median {median(totals):.3f}  max {max(totals):.3f}")


if __name__ == "__main__":
    main()
