"""Weight sync for any trainer, in five functions: `diff`, `apply`, `publish`, `pull`, `follow`.

    publish("runs/weights", model.state_dict(), step=step)          # the trainer, after a step
    for version in follow("runs/weights"):                          # an engine, anywhere
        model.load_state_dict(version.tensors_as_torch())

A store is a folder, or a URL such as `s3://bucket/prefix`. Masters may be float32: what is published is their bfloat16
image, rounded to nearest even, and what a follower gets is that image bit for bit. An engine that computes in another
dtype widens or rounds it by itself.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidemill.core.errors import BlobError, StoreError
from tidemill.core.records import Array, Snapshot
from tidemill.core.seams import Weights, bfloat16_bits
from tidemill.deltas.codec import apply, diff
from tidemill.deltas.publisher import publish_next
from tidemill.deltas.remote import open_store
from tidemill.deltas.retention import Standing
from tidemill.deltas.store import SnapshotStore

__all__ = ["Version", "apply", "diff", "follow", "publish", "pull"]


@dataclass(frozen=True, eq=False)
class Version:
    """What a follower gets."""

    manifest: Snapshot
    weights: Weights

    @property
    def tensors(self) -> dict[str, NDArray[np.uint16]]:
        """Name → bfloat16 bit patterns, read-only, in the shape of the tensor."""
        return {name: array.numpy() for name, array in self.weights.tensors.items()}

    def tensors_as_torch(self) -> dict[str, Any]:
        """Name → `torch.bfloat16` tensor. Tied weights are there as often as they were published."""
        import torch

        return {name: torch.from_numpy(bits.copy()).view(torch.bfloat16) for name, bits in self.tensors.items()}


def publish(
    store: str | Path | SnapshotStore,
    tensors: Mapping[str, Any],
    *,
    step: int,
    config: Mapping[str, Any] | None = None,
    run_id: str = "",
) -> Snapshot:
    """Publish the next version. `tensors`: name → torch tensor, or numpy array of float32 or uint16 (bfloat16 bits).

    Keep the store object between calls: it holds the base of the next delta. Raises `StoreError` for another model or
    dtype, `VersionTaken` where a run of another `run_id` publishes to the same store. Without one that goes unnoticed.
    """
    opened = store if isinstance(store, SnapshotStore) else open_store(store)
    return publish_next(opened, weights_of(tensors, config), batch=f"step {step}", step=step, run_id=run_id)


def pull(store: str | Path | SnapshotStore, version: int | None = None) -> Version:
    """A version, by default the newest: from the nearest keyframe and the deltas since, verified.

    Raises `StoreError` where there is none, or where it is damaged.
    """
    opened = store if isinstance(store, SnapshotStore) else open_store(store)
    wanted = opened.head() if version is None else version
    if wanted is None:
        raise StoreError(f"{opened} holds no version yet: publish one first")
    return Version(opened.manifest(wanted), opened.load(wanted))


def follow(
    store: str | Path | SnapshotStore,
    *,
    after: int = -1,
    poll_s: float = 0.2,
    stop: threading.Event | None = None,
    on_fault: Callable[[Exception], None] | None = None,
) -> Iterator[Version]:
    """Each time there is a version newer than the last one: the newest. Versions between may be jumped over.

    What cannot be read is told to `on_fault`, once, and asked for again: the caller goes on with what it has. Ends when
    `stop` is set. In a folder that it may write to, it says where it stands, so that `retention` leaves what it needs.
    """
    opened = store if isinstance(store, SnapshotStore) else open_store(store)
    stop = stop or threading.Event()
    told = ""
    with closing(Standing(opened)) as standing:
        while not stop.is_set():
            version: Version | None = None
            try:
                head = opened.head()
                if head is not None and head > after:
                    version = pull(opened, head)
                    after, told = head, ""
            except (StoreError, BlobError, OSError) as error:
                if on_fault is not None and str(error) != told:
                    on_fault(error)
                told = str(error)
            standing.at(after)
            if version is None:
                stop.wait(poll_s)
            else:
                yield version


def weights_of(tensors: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Weights:
    """The bfloat16 image of named tensors, copied. Raises `StoreError` for another dtype."""
    return Weights(
        config=dict(config or {}),
        tokenizer={},
        tensors={name: Array.of(_bits(name, tensor), "uint16") for name, tensor in tensors.items()},
    )


def _bits(name: str, tensor: Any) -> NDArray[np.uint16]:
    if hasattr(tensor, "detach"):
        import torch

        if not tensor.is_floating_point():
            raise StoreError(f"tensor {name} is {tensor.dtype}: the store holds floating-point weights")
        bits: NDArray[np.uint16] = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint16).numpy()
        return bits
    array = np.asarray(tensor)
    if array.dtype == np.uint16:
        return array
    if array.dtype != np.float32:
        raise StoreError(f"tensor {name} is {array.dtype}: give float32, or bfloat16 as uint16 bit patterns")
    return bfloat16_bits(array)
