"""What weight deltas cost, measured on real snapshots of SmolLM2-135M.

    python benchmarks/policy_steps.py --rate 1e-6 --out /tmp/steps      # and 3e-6, 1e-5: see there
    python benchmarks/deltas.py sizes /tmp/steps/1e-06/0007 /tmp/steps/1e-06/0008 …
    python benchmarks/deltas.py speed /tmp/steps/3e-06/0007 /tmp/steps/3e-06/0008
    python benchmarks/deltas.py chain --rate 3e-6 --num-steps 200 --store /tmp/chain
    python benchmarks/deltas.py wait --rate 3e-6 --num-steps 10 --store /tmp/wait

`sizes` compares codings on the same snapshots. `speed` gives rates per CPU second beside memcpy's and zstd's in the
same run: a busy machine slows all of them. `chain` trains, publishes every step and follows it. `wait` says how long a
learner waits for a background publisher.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray
from policy_steps import Snapshot, read_snapshot, steps

from tidemill.core.records import Array
from tidemill.core.seams import Weights
from tidemill.deltas.codec import apply, diff
from tidemill.deltas.publisher import Publisher
from tidemill.deltas.store import FolderStore
from tidemill.deltas.words import Tensor

Words = NDArray[np.uint16]


def tensors_of(snapshot: Snapshot) -> dict[str, Tensor]:
    return {name: Tensor.of("BF16", words) for name, words in snapshot.items()}


# --- others' ways --------------------------------------------------------------------------------------------


def order0_bound(old: Snapshot, new: Snapshot) -> float:
    """Bytes: positions by one probability, XOR values by their frequencies, over the whole snapshot."""
    counts = np.zeros(1 << 16, np.int64)
    num = moved = 0
    for name, before in old.items():
        xor = (before ^ new[name]).reshape(-1)
        xor = xor[xor != 0]
        counts += np.bincount(xor, minlength=1 << 16)
        num, moved = num + before.size, moved + xor.size
    frequencies = counts[counts > 0].astype(float)
    values = float((frequencies * np.log2(moved / frequencies)).sum())
    share = moved / num
    positions = -num * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    return float(positions + values) / 8


def pulse_style(old: Snapshot, new: Snapshot) -> int:
    """Gaps between moved weights as varints, new values, each through zstd-1, tensor by tensor."""
    total = 0
    for name, before in old.items():
        flat = new[name].reshape(-1)
        index = np.flatnonzero(before.reshape(-1) != flat)
        gaps = np.diff(index, prepend=-1) - 1
        parts = []
        while gaps.size:
            more = gaps >= 0x80
            parts.append(np.where(more, gaps & 0x7F | 0x80, gaps).astype(np.uint8).tobytes())
            gaps = gaps[more] >> 7  # the order of bytes differs from a stream's, their number does not
        xor = (before.reshape(-1)[index] ^ flat[index]).tobytes()
        total += len(zstandard.compress(b"".join(parts), 1)) + len(zstandard.compress(xor, 1))
    return total


def xor_zstd(old: Snapshot, new: Snapshot) -> int:
    return sum(len(zstandard.compress((before ^ new[name]).tobytes(), 1)) for name, before in old.items())


def zipnn_delta(old: Snapshot, new: Snapshot) -> int | None:
    """`zipnn`'s bfloat16 coding of the XOR; None where it is not installed."""
    try:
        import zipnn
    except ImportError:
        return None
    coder = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte")
    return sum(len(coder.compress(bytearray((before ^ new[name]).tobytes()))) for name, before in old.items())


# --- what is measured ----------------------------------------------------------------------------------------


def sizes(pairs: list[tuple[Path, Path]]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for before, after in pairs:
        old, new = read_snapshot(before), read_snapshot(after)
        num_bytes = sum(words.nbytes for words in new.values())
        moved = sum(int(np.count_nonzero(words != new[name])) for name, words in old.items())
        delta = diff(tensors_of(old), tensors_of(new))
        result = apply(delta, tensors_of(old))
        assert all(np.array_equal(result[name].words, words) for name, words in new.items())
        bound, pulse = order0_bound(old, new), pulse_style(old, new)
        row: dict[str, object] = {
            "from": f"{before.parent.name}/{before.name}",
            "to": after.name,
            "moved": moved / (num_bytes / 2),
            "delta_bytes": len(delta),
            "of_bf16": len(delta) / num_bytes,
            "order0_bytes": round(bound),
            "pulse_bytes": pulse,
            "xor_zstd_bytes": xor_zstd(old, new),
            "zipnn_bytes": zipnn_delta(old, new),
            "overwrite_bytes": len(diff(tensors_of(old), tensors_of(new), mode="overwrite")),
            "to_order0": len(delta) / bound,
            "to_pulse": len(delta) / pulse,
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def speed(before: Path, after: Path) -> None:
    old, new = tensors_of(read_snapshot(before)), tensors_of(read_snapshot(after))
    flat = np.concatenate([tensor.words.reshape(-1) for tensor in new.values()])
    target = np.empty_like(flat)
    delta = diff(old, new)
    apply(delta, old)  # the first call compiles
    sample = flat[: 1 << 24].tobytes()
    packed = zstandard.compress(sample, 1)
    rates = {
        "diff": flat.nbytes / _best(lambda: diff(old, new)),
        "apply": flat.nbytes / _best(lambda: apply(delta, old)),
        "apply_numpy": flat.nbytes / _best(lambda: apply(delta, old, compile_loops=False), repeats=1),
        "memcpy": flat.nbytes / _best(lambda: np.copyto(target, flat)),
        "zstd1_compress": len(sample) / _best(lambda: zstandard.compress(sample, 1)),
        "zstd1_decompress": len(sample) / _best(lambda: zstandard.decompress(packed)),
    }
    for name, rate in rates.items():
        print(f"{name:18} {rate / 1e6:8.0f} MB/s  {rate / rates['memcpy']:6.3f} of memcpy")
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")


def _best(call: Callable[[], object], repeats: int = 5) -> float:
    """CPU seconds: what others do on the machine still costs cache and clock, but not turns."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def chain(rate: float, num_steps: int, folder: Path, *, length: int) -> None:
    """Each step: publish, follow with another store object, compare each tensor's hash with the snapshot's own."""
    publisher, follower = FolderStore(folder), FolderStore(folder)
    wrong = 0
    rows = []
    for step, snapshot in steps(rate, num_steps, rows=1, length=length):
        weights = _weights(snapshot)
        start = time.perf_counter()
        manifest = publisher.publish(
            weights, version=step, batch=f"{step}" if step else None, step=step, run_id="chain"
        )
        published = time.perf_counter()
        loaded = follower.load(step)
        row = {
            "step": step,
            "kind": manifest.kind,
            "bytes": manifest.num_bytes,
            "publish_s": round(published - start, 3),
            "load_s": round(time.perf_counter() - published, 3),
        }
        wrong += sum(
            xxhash.xxh3_128_digest(loaded.tensors[name].data) != xxhash.xxh3_128_digest(words.tobytes())
            for name, words in snapshot.items()
        )
        rows.append(row)
        print(json.dumps(row), flush=True)
    deltas = [row["bytes"] for row in rows if row["kind"] == "delta"]
    print(json.dumps({"versions": len(rows), "deltas": len(deltas), "wrong_tensors": wrong,
                      "mean_delta_bytes": float(np.mean(deltas))}))  # fmt: skip


def wait(rate: float, num_steps: int, folder: Path, *, length: int) -> None:
    """How long the learner is held up by handing over its weights, and what becomes of them."""
    publisher = Publisher(FolderStore(folder), run_id="wait")
    held_s, step_s = [], []
    start = time.perf_counter()
    for step, snapshot in steps(rate, num_steps, rows=2, length=length):
        offered = time.perf_counter()
        publisher.offer(_weights(snapshot), step=step)
        now = time.perf_counter()
        if step:
            held_s.append(now - offered)
            step_s.append(now - start)
        start = now
    publisher.close()
    print(json.dumps({
        "steps": num_steps,
        "step_s": float(np.mean(step_s)),
        "held_s": float(np.mean(held_s)),
        "held_share": float(np.sum(held_s) / np.sum(step_s)),
        "published": publisher.num_published,
        "skipped": publisher.num_skipped,
    }))  # fmt: skip


def _weights(snapshot: Snapshot) -> Weights:
    tensors = {name: Array(data=words.tobytes(), dtype="uint16", shape=words.shape) for name, words in snapshot.items()}
    return Weights(config={"model": "SmolLM2-135M"}, tokenizer={}, tensors=tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parts = parser.add_subparsers(dest="what", required=True)
    part = parts.add_parser("sizes")
    part.add_argument("folders", type=Path, nargs="+", help="pairs: before, after, before, after, …")
    part = parts.add_parser("speed")
    part.add_argument("before", type=Path)
    part.add_argument("after", type=Path)
    for name in ("chain", "wait"):
        part = parts.add_parser(name)
        part.add_argument("--rate", type=float, default=3e-6)
        part.add_argument("--num-steps", type=int, default=200)
        part.add_argument("--length", type=int, default=96, help="tokens in a row")
        part.add_argument("--store", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.what == "sizes":
        sizes(list(zip(arguments.folders[::2], arguments.folders[1::2], strict=True)))
    elif arguments.what == "speed":
        speed(arguments.before, arguments.after)
    elif arguments.what == "wait":
        wait(arguments.rate, arguments.num_steps, arguments.store, length=arguments.length)
    else:
        chain(arguments.rate, arguments.num_steps, arguments.store, length=arguments.length)


if __name__ == "__main__":
    main()
