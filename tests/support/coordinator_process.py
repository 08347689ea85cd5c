"""A coordinator in a process of its own, to be killed: `python coordinator_process.py FOLDER PORT`."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.coordinator_world import ManifestStore, identity
from tidemill.batches.coordinator import JournalCoordinator
from tidemill.batches.http import coordinator_server
from tidemill.core.blobs import FolderBlobs

KILLED = identity(rl=7, group_size=2, groups_per_batch=2, max_age=1, num_updates=12)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    coordinator = JournalCoordinator(
        folder / "journal.sqlite",
        KILLED,
        blobs=FolderBlobs(folder / "blobs"),
        store=ManifestStore(folder / "versions"),  # type: ignore[arg-type]
    )
    asyncio.run(coordinator_server(coordinator, "token", port=int(sys.argv[2])).serve())
