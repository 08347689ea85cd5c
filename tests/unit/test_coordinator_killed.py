"""Law 9 for the coordinator: killed with SIGKILL at any instant, it loses nothing and does nothing twice."""

import asyncio
import random
import signal
import socket
import sqlite3
import sys
from collections import Counter
from pathlib import Path

import support.coordinator_process as killed
from support.coordinator_world import ManifestStore, made_up_result
from tidemill.batches.client import HttpCoordinator
from tidemill.core.blobs import FolderBlobs
from tidemill.core.journal import read_journal
from tidemill.core.records import Batch, digest

NUM_KILLS = 5


class Drill:
    """Two workers and a learner over a coordinator that keeps being killed in the middle of their calls."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self.random = random.Random(5)
        self.blobs = FolderBlobs(folder / "blobs")
        self.store = ManifestStore(folder / "versions")
        self.client = HttpCoordinator(f"http://127.0.0.1:{port}", "token", patience_s=30.0)
        self.accepted: Counter[str] = Counter()
        self.started_after_done: list[str] = []
        self.trained: list[Batch] = []
        self.num_kills = 0
        self.killed_enough = asyncio.Event()

    async def serve(self) -> None:
        """Start it, let it live for a moment of a few calls, kill it; at last let it live."""
        while True:
            process = await asyncio.create_subprocess_exec(
                sys.executable, killed.__file__, str(self.folder), str(self.port)
            )
            try:
                await self.client.status()
                if self.num_kills < NUM_KILLS:
                    await asyncio.sleep(self.random.uniform(0.0, 0.06))
                    process.send_signal(signal.SIGKILL)
                    self.num_kills += 1
                else:
                    self.killed_enough.set()
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def work(self, worker: str) -> None:
        while True:
            for attempt in await self.client.lease(worker, "1", 2, 5.0):
                if self.accepted[attempt.id]:
                    self.started_after_done.append(attempt.id)
                result = made_up_result(self.blobs, attempt, reward=float(attempt.seed % 2))
                self.accepted[attempt.id] += await self.client.complete(result)

    async def learn(self) -> None:
        self.store.publish(None)
        for index in range(killed.KILLED.config.num_updates):
            if index == killed.KILLED.config.num_updates - 1:
                await self.killed_enough.wait()
            batch = None
            while batch is None:
                batch = await self.client.batch(index, 5.0)
            again = await self.client.batch(index, 5.0)
            assert again is not None and digest(again) == digest(batch)
            self.trained.append(batch)
            self.store.publish(batch)

    async def run(self) -> None:
        others = [asyncio.create_task(c) for c in (self.serve(), self.work("a"), self.work("b"))]
        try:
            async with asyncio.timeout(60):
                await self.learn()
            status = await self.client.status()
            assert status.finished
            assert status.accepted == status.trained + status.queued + status.rejected
            assert status.rejected == 0
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self.client.close()
        for task in others:
            assert task.cancelled(), "a worker or the server failed"


def test_a_coordinator_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    drill = Drill(tmp_path, port)
    asyncio.run(drill.run())
    assert drill.num_kills == NUM_KILLS
    assert drill.started_after_done == [], "a finished episode was run again"
    assert set(drill.accepted.values()) == {1}, "a result was refused, or taken twice"
    trained = [item.attempt_id for batch in drill.trained for item in batch.items]
    assert len(trained) == len(set(trained)) == 12 * 2 * 2
    assert set(trained) <= set(drill.accepted)
    rows = read_journal(tmp_path / "journal.sqlite")
    assert [batch.digest for batch in rows.batches] == [digest(batch) for batch in drill.trained]
    assert {row.id for row in rows.attempts if row.state == "done"} == set(drill.accepted)
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    db.close()
