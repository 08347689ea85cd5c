"""Folders of `*.safetensors` files as named tensors, read where they lie and written in one go."""

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from tidemill.core.errors import DeltaError, ModelError
from tidemill.deltas.codec import Entry
from tidemill.deltas.words import KINDS, Tensor, kind_of

INDEX_SUFFIX = ".safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000


@final
class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of all `*.safetensors` files of a folder (or of one file), mapped into memory, not read.

    Raises `ModelError` for a folder without such files, and for files that are cut off or malformed.
    """

    def __init__(self, path: Path) -> None:
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{path} holds no .safetensors file: give a folder in the Hugging Face layout")
        self._tensors: dict[str, tuple[str, tuple[int, ...], memoryview]] = {}
        for file in files:
            for name, entry in _entries(file):
                if name in self._tensors:
                    raise ModelError(f"tensor {name} is in two files of {path}")
                self._tensors[name] = entry

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape, data = self._tensors[name]
        return Tensor.of(dtype, np.frombuffer(data, kind_of(dtype).word).reshape(shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for _, _, data in self._tensors.values())


def _entries(file: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...], memoryview]]]:
    with open(file, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ModelError(f"{file} is cut off: its header does not fit into it")
        try:
            header: dict[str, Any] = json.loads(handle.read(length))
        except ValueError as error:
            raise ModelError(f"{file} is damaged: its header is no JSON: {error}") from None
        data = memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
            start, end = (8 + length + int(offset) for offset in entry["data_offsets"])
            num_bytes = int(np.prod(shape, dtype=np.int64)) * KINDS[dtype].bits // 8
        except (KeyError, TypeError, ValueError):
            raise ModelError(f"{file}: tensor {name} is described in a way that cannot be read: {entry}") from None
        if not 8 + length <= start <= end <= size or end - start != num_bytes:
            raise ModelError(f"{file}: tensor {name} is cut off")
        yield name, (dtype, shape, data[start:end])


def write_folder(folder: Path, entries: Iterable[Entry], tensors: Iterable[tuple[str, Tensor]], side: Path) -> None:
    """Write `model.safetensors` as the tensors come, and copy the other files of `side`; `folder` appears whole.

    `entries` name the tensors in the order in which they come. Raises `ModelError` where `folder` holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is not empty: choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".weights-", ignore_cleanup_errors=True) as temporary:
        aside = Path(temporary) / folder.name
        aside.mkdir()
        if side.is_dir():
            for file in side.iterdir():
                if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(INDEX_SUFFIX):
                    shutil.copyfile(file, aside / file.name)
        with open(aside / "model.safetensors", "wb") as out:
            out.write(_header(entries))
            for _, tensor in tensors:
                out.write(tensor.words.data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(aside, folder)


def _header(entries: Iterable[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        if entry.dtype not in KINDS:
            raise DeltaError(f"tensor {entry.name} has the unknown dtype {entry.dtype}")
        end = at + entry.size * KINDS[entry.dtype].bits // 8
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
