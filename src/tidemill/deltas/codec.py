"""Lossless weight deltas: `apply(diff(old, new), old)` is `new`, bit for bit, for every dtype.

Pure functions over named tensors of bit patterns. `docs/delta-format.md` has the bytes; `sparse` the modelling.

The format is a header (names, dtypes, shapes), then tensor after tensor, each in pieces of at most `PIECE` weights,
each piece with a checksum, each tensor with the hash of its result; then an end mark. So a writer and a reader need one
tensor at a time, pieces are coded in parallel, and a wrong tensor is never returned: damage is found by the checksums,
a wrong base by the hash of the result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from math import prod
from typing import Literal, Protocol, TypeVar

import msgspec
import numpy as np
import xxhash
import zstandard

from tidemill.core.errors import DeltaError
from tidemill.deltas.kernels import kernels
from tidemill.deltas.pieces import Coding, decode_piece, encode_piece, overwrite_piece
from tidemill.deltas.sparse import Place
from tidemill.deltas.wire import varint
from tidemill.deltas.words import Tensor, Words, kind_of

T = TypeVar("T")
Mode = Literal["differential", "overwrite"]
Tensors = Mapping[str, Tensor]
"""Name → tensor. Any mapping will do: one that reads a file when it is asked keeps memory bounded."""

MAGIC = b"TMDELTA"
VERSION = 1
END = b"TMDEND"
PIECE = 1 << 22
"""Weights in a piece, at most."""
MAX_HEADER_BYTES = 1 << 28
_MODES: tuple[Mode, ...] = ("differential", "overwrite")


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the result, as the header lists it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fresh: bool
    """The base has no such tensor, or one of another dtype or shape: the delta holds it whole."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def columns(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 0


@dataclass(frozen=True)
class Part:
    """What the writer made of a tensor, for tables and logs."""

    name: str
    num_weights: int
    num_bytes: int
    """In the delta, the hash included."""
    codings: tuple[str, ...]
    """Of each piece."""


class _Source(Protocol):
    def read(self, num_bytes: int, /) -> bytes: ...


class _Sink(Protocol):
    def write(self, data: bytes, /) -> object: ...


def diff(
    old: Tensors, new: Tensors, *, mode: Mode = "differential", threads: int = 1, compile_loops: bool | None = None
) -> bytes:
    """The delta from `old` to `new`.

    mode: `differential` is the smallest, and applies to `old` alone; `overwrite` also applies to `new`, and to anything
    between the two (idempotent), at about twice the size. Tensors that are only in `old` are gone in the result.
    Raises `DeltaError` for a dtype that the codec does not know.
    """
    sink = BytesIO()
    for _ in diff_stream(old, new, sink, mode=mode, threads=threads, compile_loops=compile_loops):
        pass
    return sink.getvalue()


def apply(delta: bytes, old: Tensors, *, threads: int = 1, compile_loops: bool | None = None) -> dict[str, Tensor]:
    """The tensors that `delta` leads to from `old`. `compile_loops`: see `kernels`; the result is the same.

    Raises `DeltaError` for a delta that is damaged, cut off, of another format version or of another base.
    """
    return dict(apply_stream(BytesIO(delta), old, threads=threads, compile_loops=compile_loops))


def diff_stream(
    old: Tensors,
    new: Tensors,
    sink: _Sink,
    *,
    mode: Mode = "differential",
    threads: int = 1,
    piece: int = PIECE,
    compile_loops: bool | None = None,
) -> Iterator[Part]:
    """As `diff`, tensor by tensor into `sink`; yields what became of each once it is written.

    At most one tensor of each side is held, and the pieces of it that are under way. `piece`: weights in a piece.
    """
    entries = [_entry(name, old, new) for name in sorted(new)]
    loops = kernels(compile_loops)
    header = zstandard.compress(msgspec.msgpack.encode((_MODES.index(mode), piece, entries)), 9)
    head = MAGIC + bytes([VERSION]) + varint(len(header)) + header
    salt = xxhash.xxh3_64_intdigest(head)
    sink.write(head + salt.to_bytes(8, "little"))
    with _pool(threads) as pool:
        for number, entry in enumerate(entries):
            now = new[entry.name].words.reshape(-1)
            was = None if entry.fresh else old[entry.name].words.reshape(-1)
            jobs = []
            for start in range(0, now.size, piece):
                part = slice(start, min(start + piece, now.size))
                place = Place(kind_of(entry.dtype), entry.columns, start, loops)
                jobs.append(partial(_encode, mode, None if was is None else was[part], now[part], place))
            num_bytes = 0
            codings = []
            for index, (coding, payload) in enumerate(_ordered(jobs, pool)):
                body = bytes([coding]) + payload
                record = varint(len(body)) + body + _check(body, salt, number, index)
                sink.write(record)
                num_bytes += len(record)
                codings.append(coding.name.lower())
            sink.write(_digest(now))
            yield Part(entry.name, now.size, num_bytes + 16, tuple(codings))
    sink.write(_end(salt, len(entries)))


def apply_stream(
    source: _Source, old: Tensors, *, threads: int = 1, compile_loops: bool | None = None
) -> Iterator[tuple[str, Tensor]]:
    """As `apply`, tensor by tensor from a binary stream: each is verified before it is yielded.

    What was yielded is right even where a later part is damaged; the whole is complete when the iterator ends.
    """
    loops = kernels(compile_loops)
    mode, piece, entries, salt = read_header(source)
    del mode  # each piece says how it is coded
    with _pool(threads) as pool:
        for number, entry in enumerate(entries):
            was = None if entry.fresh else _base(old, entry)
            out = np.empty(entry.size, kind_of(entry.dtype).word)
            jobs = []
            for index, start in enumerate(range(0, entry.size, piece)):
                body = _body(source, salt, number, index)
                part = slice(start, min(start + piece, entry.size))
                place = Place(kind_of(entry.dtype), entry.columns, start, loops)
                jobs.append(
                    partial(decode_piece, body[0], body[1:], None if was is None else was[part], out[part], place)
                )
            try:
                for _ in _ordered(jobs, pool):
                    pass
            except DeltaError as error:
                raise DeltaError(
                    f"tensor {entry.name} cannot be decoded, and the delta is whole: "
                    f"this is not the base that it was made from ({error})"
                ) from None
            if _take(source, 16) != _digest(out):
                raise DeltaError(
                    f"tensor {entry.name}: the result has another hash, and the delta is whole: "
                    "this is not the base that it was made from"
                )
            yield entry.name, Tensor(entry.dtype, out.reshape(entry.shape))
    if _take(source, len(END) + 8) != _end(salt, len(entries)):
        raise DeltaError("damaged delta: its end mark is wrong")
    if source.read(1):
        raise DeltaError("damaged delta: something follows its end")


def read_header(source: _Source) -> tuple[Mode, int, list[Entry], int]:
    """Mode, weights in a piece, the tensors of the result, and the salt of the checksums. Raises `DeltaError`."""
    start = _take(source, len(MAGIC) + 1)
    if not start.startswith(MAGIC):
        raise DeltaError("this is no Tidemill delta: it does not begin with " + MAGIC.decode())
    if start[-1] != VERSION:
        raise DeltaError(f"the delta has format version {start[-1]}, this program reads {VERSION}: update it")
    length, raw = _varint(source)
    if length > MAX_HEADER_BYTES:
        raise DeltaError(f"damaged delta: a header of {length} bytes")
    packed = _take(source, length)
    salt = xxhash.xxh3_64_intdigest(start + raw + packed)
    if _take(source, 8) != salt.to_bytes(8, "little"):
        raise DeltaError("damaged delta: the header has another checksum")
    try:
        mode, piece, entries = msgspec.msgpack.decode(
            zstandard.decompress(packed, max_output_size=MAX_HEADER_BYTES), type=tuple[int, int, list[Entry]]
        )
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise DeltaError(f"damaged delta: its header cannot be read: {error}") from None
    if mode >= len(_MODES) or piece < 1:
        raise DeltaError(f"damaged delta: mode {mode}, pieces of {piece}")
    return _MODES[mode], piece, entries, salt


def _entry(name: str, old: Tensors, new: Tensors) -> Entry:
    now = new[name]
    kind_of(now.dtype)
    was = old.get(name)
    fresh = was is None or was.dtype != now.dtype or was.shape != now.shape
    return Entry(name=name, dtype=now.dtype, shape=now.shape, fresh=fresh)


def _base(old: Tensors, entry: Entry) -> Words:
    was = old.get(entry.name)
    if was is None:
        raise DeltaError(f"the base has no tensor {entry.name}: this is not the base that the delta was made from")
    if was.dtype != entry.dtype or was.shape != entry.shape:
        raise DeltaError(
            f"tensor {entry.name} of the base is {was.dtype} {list(was.shape)}, the delta is for "
            f"{entry.dtype} {list(entry.shape)}: this is not the base that it was made from"
        )
    return was.words.reshape(-1)


def _encode(mode: Mode, old: Words | None, new: Words, place: Place) -> tuple[Coding, bytes]:
    if mode == "overwrite" or old is None:
        return overwrite_piece(old, new)
    return encode_piece(old, new, place)


def _body(source: _Source, salt: int, number: int, index: int) -> bytes:
    length, _ = _varint(source)
    body = _take(source, length)
    if not body or _take(source, 4) != _check(body, salt, number, index):
        raise DeltaError(f"damaged delta: part {index} of tensor {number} has another checksum")
    return body


def _digest(words: Words) -> bytes:
    return xxhash.xxh3_128_digest(words.data)


def _check(body: bytes, salt: int, number: int, index: int) -> bytes:
    """Bound to its place in this very delta: a part that was moved, or taken from another delta, is refused."""
    place = (salt + number * 0x9E3779B97F4A7C15 + index * 0xC2B2AE3D27D4EB4F) & 0xFFFFFFFFFFFFFFFF
    return xxhash.xxh3_64_digest(body, seed=place)[:4]


def _end(salt: int, num_tensors: int) -> bytes:
    return END + xxhash.xxh3_64_digest(num_tensors.to_bytes(8, "little"), seed=salt)


def _take(source: _Source, num_bytes: int) -> bytes:
    parts = []
    while num_bytes > 0:
        # In steps, so that a damaged length cannot ask for all memory at once.
        data = source.read(min(num_bytes, 1 << 24))
        if not data:
            raise DeltaError("damaged delta: it ends too early")
        parts.append(data)
        num_bytes -= len(data)
    return b"".join(parts)


def _varint(source: _Source) -> tuple[int, bytes]:
    number, raw = 0, b""
    for shift in range(0, 63, 7):
        byte = _take(source, 1)
        raw += byte
        number |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return number, raw
    raise DeltaError("damaged delta: a length is too long")


def _pool(threads: int) -> "nullcontext[None] | ThreadPoolExecutor":
    if threads < 1:
        raise ValueError(f"threads is {threads}: give 1 or more")
    return ThreadPoolExecutor(threads, thread_name_prefix="deltas") if threads > 1 else nullcontext()


def _ordered(jobs: Sequence[Callable[[], T]], pool: Executor | None) -> Iterator[T]:
    """Results in the order of the jobs."""
    if pool is None:
        yield from (job() for job in jobs)
        return
    futures = [pool.submit(job) for job in jobs]
    yield from (future.result() for future in futures)
