"""A plain PyTorch loop that publishes after each step, and another process that follows it.

    python examples/publish_and_follow.py

The trainer needs one line. The follower gets the bfloat16 image of the trainer's weights, bit for bit: it prints how
many bytes each version was, and a checksum that the trainer prints too.
"""

import multiprocessing
import sys
import tempfile
import zlib

import torch

from tidemill.deltas.api import follow, publish
from tidemill.deltas.store import FolderStore

NUM_STEPS = 20


def checksum(tensors: dict[str, torch.Tensor]) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].to(torch.bfloat16).view(torch.uint16).numpy().tobytes(), value)
    return value


def train(folder: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    store = FolderStore(folder)
    for step in range(NUM_STEPS):
        x = torch.randn(64, 256)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        publish(store, model.state_dict(), step=step)
    print(f"trainer:  version {NUM_STEPS - 1}, checksum {checksum(model.state_dict()):08x}", flush=True)


def serve(folder: str) -> None:
    for version in follow(folder, poll_s=0.02):
        tensors = version.tensors_as_torch()
        manifest = version.manifest
        print(
            f"follower: version {manifest.version}, {manifest.kind}, {manifest.num_bytes:,} bytes, "
            f"checksum {checksum(tensors):08x}",
            flush=True,
        )
        if manifest.version == NUM_STEPS - 1:
            return


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        processes = [spawn.Process(target=job, args=(folder,)) for job in (serve, train)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        sys.exit(max(process.exitcode or 0 for process in processes))


if __name__ == "__main__":
    main()
