"""One piece of a tensor: several codings, of which the smallest by a cheap forecast is written.

| coding | needs the old weights | what it is                                                        |
|--------|-----------------------|-------------------------------------------------------------------|
| SAME   | yes                   | nothing moved: no payload                                         |
| SPARSE | yes                   | positions and distances, given the old weights (`sparse`)         |
| PLANES | yes                   | distances of all weights, zigzag, byte planes, zstd               |
| WHOLE  | no                    | the new words, byte planes, zstd                                  |
| PLACES | no, but a right base  | positions and new words: applied twice, or over a half, it does no harm |

The differential mode chooses among the first four, the overwrite mode between the last two.
"""

from enum import IntEnum

import numpy as np
import zstandard
from numpy.typing import NDArray

from tidemill.core.errors import DeltaError
from tidemill.deltas import sparse
from tidemill.deltas.runs import RunReader, RunWriter
from tidemill.deltas.sparse import Place
from tidemill.deltas.wire import Reader
from tidemill.deltas.words import Kind, Words, ordered, unordered

LEVEL = 1
SAMPLE = 1 << 16
"""Weights that the forecast of a dense coding looks at."""
DENSE_SHARE = 0.25
"""Below this share of moved weights the dense coding is not even forecast."""
DENSE_COST = 0.6
"""Where many weights moved, the sparse coding takes ten times as long as planes: it must save that much to be taken."""
SPARSE_BITS = 32
"""The sparse coding is for words of at most this width."""


class Coding(IntEnum):
    SAME = 0
    SPARSE = 1
    PLANES = 2
    WHOLE = 3
    PLACES = 4


def encode_piece(old: Words, new: Words, place: Place) -> tuple[Coding, bytes]:
    """The difference of two flat pieces of one length."""
    kind = place.kind
    index = np.flatnonzero(old != new)
    if index.size == 0:
        return Coding.SAME, b""
    if kind.bits <= SPARSE_BITS and index.size < DENSE_SHARE * old.size:
        return Coding.SPARSE, sparse.encode(old, sparse.moves(old, new, index, place), place)
    size = min(SAMPLE, old.size)
    sample = slice((old.size - size) // 2, (old.size - size) // 2 + size)
    before, after = old[sample], new[sample]
    forecasts: dict[Coding, float] = {
        Coding.PLANES: len(_planes(_zigzag(before, after, kind))),
        Coding.WHOLE: len(_planes(after)),
    }
    if kind.bits <= SPARSE_BITS:
        moved = sparse.moves(before, after, np.flatnonzero(before != after), place)
        forecasts[Coding.SPARSE] = moved.estimate_bytes() / DENSE_COST
    best = min(forecasts, key=lambda coding: forecasts[coding])
    if best == Coding.SPARSE:
        return best, sparse.encode(old, sparse.moves(old, new, index, place), place)
    return best, _planes(_zigzag(old, new, kind) if best == Coding.PLANES else new)


def overwrite_piece(old: Words | None, new: Words) -> tuple[Coding, bytes]:
    """What makes `new` out of `old`, out of `new`, and out of anything in between; without `old`, out of nothing."""
    if old is not None:
        index = np.flatnonzero(old != new)
        if index.size < DENSE_SHARE * new.size:
            writer = RunWriter()
            writer.put_items(index, invert=False)
            return Coding.PLACES, bytes(writer.head) + writer.streams() + _planes(new[index])
    return Coding.WHOLE, _planes(new)


def decode_piece(coding: int, payload: bytes, old: Words | None, out: Words, place: Place) -> None:
    """Write the new words into `out`. Raises `DeltaError` for damage, and where old weights are missing."""
    if coding == Coding.WHOLE:
        np.copyto(out, _unplanes(payload, out.size, place.kind))
        return
    if old is None:
        raise DeltaError("it changes a tensor that the base does not have")
    if coding == Coding.SAME:
        if payload:
            raise DeltaError("damaged delta: a payload where nothing moved")
        np.copyto(out, old)
    elif coding == Coding.SPARSE:
        sparse.decode(payload, old, out, place)
    elif coding == Coding.PLANES:
        np.copyto(out, _unzigzag(old, _unplanes(payload, out.size, place.kind), place.kind))
    elif coding == Coding.PLACES:
        _overwrite(payload, old, out, place)
    else:
        raise DeltaError(f"damaged delta: coding {coding} is unknown")


def _overwrite(payload: bytes, old: Words, out: Words, place: Place) -> None:
    reader = Reader(payload)
    runs = RunReader()
    runs.read_head(reader)
    index = np.cumsum(runs.read_gaps(reader, place.loops) + 1) - 1
    if index.size and index[-1] >= old.size:
        raise DeltaError("damaged delta: a position lies outside the tensor")
    np.copyto(out, old)
    out[index] = _unplanes(reader.rest(), index.size, place.kind)


def _zigzag(old: Words, new: Words, kind: Kind) -> Words:
    """Distances in the dtype's order: 0, −1, 1, −2, … → 0, 1, 2, 3, …"""
    distance = (ordered(new, kind) - ordered(old, kind)).view(f"<i{kind.bits // 8}")
    return ((distance << 1) ^ (distance >> (kind.bits - 1))).view(kind.word)


def _unzigzag(old: Words, zigzag: Words, kind: Kind) -> Words:
    one = zigzag.dtype.type(1)
    distance = (zigzag >> one) ^ (~(zigzag & one) + one)
    return unordered((ordered(old, kind) + distance).astype(zigzag.dtype), kind)


def _planes(words: Words) -> bytes:
    """All lowest bytes, then all second ones, …, as one zstd frame that states its size."""
    planes: NDArray[np.uint8] = words.view(np.uint8).reshape(words.size, words.itemsize).T
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(planes).tobytes())


def _unplanes(payload: bytes, size: int, kind: Kind) -> Words:
    num_bytes = size * kind.bits // 8
    try:
        # The frame's own statement of its size is checked before anything is allocated.
        if zstandard.frame_content_size(payload) != num_bytes:
            raise DeltaError("damaged delta: a part has another size than its tensor")
        data = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"damaged delta: {error}") from None
    planes = np.frombuffer(data, np.uint8).reshape(kind.bits // 8, size)
    return np.ascontiguousarray(planes.T).reshape(-1).view(kind.word)
