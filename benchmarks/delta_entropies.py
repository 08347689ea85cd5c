"""What a weight's move has to be told apart from: entropies behind the sparse coding's choice of contexts.

    python benchmarks/policy_steps.py --rate 1e-6 --out /tmp/steps
    python benchmarks/delta_entropies.py /tmp/steps/1e-06/0007 /tmp/steps/1e-06/0008

Ideal code lengths in kB, with every probability known for nothing, tensor by tensor. Read beside `deltas.py sizes`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from policy_steps import read_snapshot

from tidemill.deltas.words import kind_of, ordered

BF16 = kind_of("BF16")


def entropy_bits(symbols: NDArray[np.int64], contexts: NDArray[np.int64]) -> float:
    """Σ −log2 p(symbol | context), by their frequencies."""
    width = int(symbols.max(initial=0)) + 1
    table = np.bincount(contexts * width + symbols, minlength=(int(contexts.max(initial=0)) + 1) * width)
    table = table.reshape(-1, width).astype(float)
    totals = table.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nansum(np.where(table > 0, -table * np.log2(table / totals), 0.0)))


def measure(before: NDArray[np.uint16], after: NDArray[np.uint16]) -> dict[str, float]:
    old, new = before.reshape(-1), after.reshape(-1)
    moved = old != new
    exponent = (old.astype(np.int64) >> 7) & 255
    was, now = old[moved], new[moved]
    distance = (ordered(now, BF16) - ordered(was, BF16)).view(np.int16).astype(np.int64)
    magnitude = np.abs(distance)
    octave = np.frexp(magnitude.astype(float))[1].astype(np.int64) - 1
    shrinks = (distance < 0) ^ (was >> 15).astype(bool)
    large = octave >= 2
    upper = (magnitude >> np.maximum(octave - 1, 0)) & 1
    classes = exponent[moved]
    found = {
        "positions": entropy_bits(moved.astype(np.int64), exponent),
        "positions_and_old_mantissa": entropy_bits(
            moved.astype(np.int64), exponent << 3 | (old.astype(np.int64) >> 4) & 7
        ),
        "directions": entropy_bits(shrinks.astype(np.int64), classes),
        "octaves": entropy_bits(octave, classes),
        "mantissas": entropy_bits(upper[octave == 1], classes[octave == 1]) + float(octave[large].sum()),
        "upper_of_large": entropy_bits(upper[large], classes[large] << 5 | octave[large]),
        "num_large": float(large.sum()),
    }
    if before.ndim == 2:
        column = np.flatnonzero(moved) % before.shape[1]
        mostly = np.abs(np.bincount(column, weights=np.sign(distance), minlength=before.shape[1])).sum()
        found |= {"prevailing": (moved.sum() + mostly) / 2, "num_in_columns": float(moved.sum())}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    old, new = read_snapshot(arguments.before), read_snapshot(arguments.after)
    rows = {name: measure(words, new[name]) for name, words in old.items()}
    total = {key: sum(row.get(key, 0.0) for row in rows.values()) for key in next(iter(rows.values()))}
    embedding = max((row for row in rows.values() if "prevailing" in row), key=lambda row: row["num_in_columns"])
    parts = ("positions", "directions", "octaves", "mantissas")
    print(json.dumps({
        "entropy_kB": round(sum(total[part] for part in parts) / 8000),
        **{f"{part}_kB": round(total[part] / 8000) for part in parts},
        "saved_by_old_mantissa": round(1 - total["positions_and_old_mantissa"] / total["positions"], 4),
        "upper_bit_of_large_moves": round(total["upper_of_large"] / max(total["num_large"], 1), 3),
        "prevailing_sign_in_embedding": round(embedding["prevailing"] / embedding["num_in_columns"], 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
