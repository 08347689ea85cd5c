"""A policy as the files of a Hugging Face folder, and as tensors for the codec; what a store calls its manifests."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import xxhash
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from tidemill.core.errors import StoreError
from tidemill.core.records import Array
from tidemill.core.seams import Weights
from tidemill.deltas.words import Tensor

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
DELTA_FILE = "model.delta"
"""In a manifest, where the weights are a delta. It is in no exported folder."""
RESERVED_FILES = (CONFIG_FILE, WEIGHTS_FILE, DELTA_FILE)

_MANIFEST_NAME = re.compile(r"(\d{8,})\.json")


def manifest_name(version: int) -> str:
    return f"{version:08d}.json"


def versions_among(names: Iterable[str]) -> list[int]:
    """Of the manifests among these file names; what else lies beside them is passed over."""
    matches = map(_MANIFEST_NAME.fullmatch, names)
    return [int(match[1]) for match in matches if match]


def tensor_hash(array: Array) -> str:
    """xxh3-128 of a tensor's bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(array.data)


def weights_files(weights: Weights) -> dict[str, bytes]:
    """The Hugging Face folder of a policy, file name → content. Equal weights give equal bytes.

    Raises `StoreError` for a tensor that is not uint16 bit patterns, or a tokenizer file with a reserved name.
    """
    arrays = {name: tensor.words for name, tensor in codec_tensors(weights).items()}
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=list(a.shape), data_ptr=a.ctypes.data, data_len=a.nbytes)
        for name, a in arrays.items()
    }
    return {**side_files(weights), WEIGHTS_FILE: bytes(serialize(specs, metadata={"format": "pt"}))}


def side_files(weights: Weights) -> dict[str, bytes]:
    """All files but the weights. Raises `StoreError` for a tokenizer file with a reserved name."""
    for name in weights.tokenizer:
        if name in RESERVED_FILES or name != Path(name).name or name in ("", ".", ".."):
            raise StoreError(f"{name!r} cannot be a tokenizer file: give it a plain name other than {CONFIG_FILE}")
    config = json.dumps(weights.config, indent=2, sort_keys=True) + "\n"
    return {**weights.tokenizer, CONFIG_FILE: config.encode()}


def codec_tensors(weights: Weights) -> dict[str, Tensor]:
    """Name → bfloat16 tensor, without a copy. Raises `StoreError` for another dtype, or for no tensor at all."""
    if not weights.tensors:
        raise StoreError("weights without tensors: publish a whole policy")
    tensors = {}
    for name, array in sorted(weights.tensors.items()):
        if array.dtype != "uint16":
            raise StoreError(f"tensor {name} is {array.dtype}: publish bfloat16 as uint16 bit patterns")
        try:
            tensors[name] = Tensor.of("BF16", array.numpy())
        except ValueError as error:
            raise StoreError(f"tensor {name}: buffer and shape disagree: {error}") from None
    return tensors


def array_of(tensor: Tensor) -> Array:
    """Inverse of what `codec_tensors` does to one tensor. Raises `StoreError` for another dtype than bfloat16."""
    if tensor.dtype != "BF16":
        raise StoreError(f"a delta leads to {tensor.dtype}: the store holds bfloat16")
    return Array(data=np.ascontiguousarray(tensor.words).tobytes(), dtype="uint16", shape=tensor.shape)


def read_weights_file(data: bytes) -> dict[str, Array]:
    """Tensors of a `model.safetensors` in bfloat16. Raises `StoreError` for a cut-off file or another dtype."""
    try:
        entries = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise StoreError(f"{WEIGHTS_FILE} cannot be read: {error}") from None
    tensors = {}
    for name, entry in entries:
        if entry["dtype"] != "BF16":
            raise StoreError(f"tensor {name} is {entry['dtype']}: the store holds bfloat16")
        tensors[name] = Array(data=bytes(entry["data"]), dtype="uint16", shape=tuple(entry["shape"]))
    return tensors
