"""How long until a follower behind a long line serves the policy of a step that has just ended.

    python benchmarks/deltas.py chain --store /tmp/chain --num-steps 40          # real steps of SmolLM2-135M
    python benchmarks/wan.py /tmp/chain --first 31 --num-versions 5
    python benchmarks/wan.py /tmp/chain --first 31 --num-versions 2 --full       # the same with full snapshots

The line is a proxy on the loopback that delays both directions by half of the round trip and passes a limited rate; the
object store is moto's S3 server beside the trainer's end. Trainer and follower are processes of their own, each with a
line of its own. Time runs from the end of the step (weights in memory) to verified weights in the follower's memory.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from pathlib import Path
from queue import Queue
from typing import Any

RTT_S = 0.150
RATE_BYTES_S = 100e6 / 8
BUCKET = "weights"


class Line:
    """One direction of a link: `pump` passes bytes on, late and not too fast."""

    def __init__(self) -> None:
        self.free_at = 0.0

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first_delay_s: float) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=4096)
        opened_at = time.monotonic() + first_delay_s

        async def deliver() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(due - time.monotonic(), 0))
                if not data:
                    writer.close()
                    return
                writer.write(data)
                await writer.drain()

        task = asyncio.create_task(deliver())
        while True:
            data = await reader.read(1 << 14)
            self.free_at = max(self.free_at, time.monotonic(), opened_at) + len(data) / RATE_BYTES_S
            await asyncio.sleep(max(self.free_at - time.monotonic() - 0.05, 0))
            await queue.put((self.free_at + RTT_S / 2, data))
            if not data:
                break
        await task


def proxy(target: int, ready: Any) -> None:
    """A line to a port of this machine; says its own port. Connections share it; each opens with a round trip."""

    async def main() -> None:
        up, down = Line(), Line()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
            jobs = (up.pump(reader, far_writer, RTT_S), down.pump(far_reader, writer, 0.0))
            await asyncio.gather(*jobs, return_exceptions=True)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        ready.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def serve_s3(ready: Any) -> None:
    import logging

    from moto.server import ThreadedMotoServer
    from werkzeug.serving import WSGIRequestHandler

    WSGIRequestHandler.protocol_version = "HTTP/1.1"  # connections are kept, as S3 keeps them
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    ready.put(server.get_host_and_port()[1])
    while True:
        time.sleep(60)


def open_remote(port: int, *, full: bool) -> Any:
    from tidemill.deltas.remote import ObjectStore

    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "test", "secret": "test"}
    return ObjectStore(f"s3://{BUCKET}/policy", options=options, keyframe_every=1 if full else 30, threads=2)


def follow_remote(port: int, full: bool, said: Any) -> None:
    from tidemill.deltas.api import follow

    for version in follow(open_remote(port, full=full), poll_s=0.1):
        said.put((version.manifest.version, time.time()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("chain", type=Path, help="a store of real steps")
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--num-versions", type=int, default=5)
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1")
    spawn = multiprocessing.get_context("spawn")
    ready, said = spawn.Queue(), spawn.Queue()
    children = [spawn.Process(target=serve_s3, args=(ready,), daemon=True)]
    children[0].start()
    near = ready.get(timeout=60)
    ports = []
    for _ in range(2):
        children.append(spawn.Process(target=proxy, args=(near, ready), daemon=True))
        children[-1].start()
        ports.append(ready.get(timeout=60))
    run(arguments, near, ports, said, spawn)


def run(arguments: argparse.Namespace, near: int, ports: list[int], said: "Queue[Any]", spawn: Any) -> None:
    import s3fs

    from tidemill.deltas.store import FolderStore

    s3fs.S3FileSystem(endpoint_url=f"http://127.0.0.1:{near}", key="test", secret="test").mkdir(BUCKET)
    steps = FolderStore(arguments.chain)
    versions = range(arguments.first, arguments.first + arguments.num_versions + 1)
    weights = [steps.load(version) for version in versions]
    open_remote(near, full=arguments.full).publish(weights[0], version=0, batch=None, step=0, run_id="wan")
    trainer = open_remote(ports[0], full=arguments.full)
    trainer._held = (0, weights[0])
    follower = spawn.Process(target=follow_remote, args=(ports[1], arguments.full, said), daemon=True)
    follower.start()
    said.get(timeout=300)
    for number, each in enumerate(weights[1:], start=1):
        ended = time.time()
        snapshot = trainer.publish(each, version=number, batch=f"{number}", step=number, run_id="wan")
        published = time.time()
        served, at = said.get(timeout=300)
        assert served == number
        row = {
            "version": number,
            "kind": snapshot.kind,
            "bytes": snapshot.num_bytes,
            "published_s": round(published - ended, 2),
            "serving_s": round(at - ended, 2),
        }
        print(json.dumps(row), flush=True)
    follower.terminate()
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
