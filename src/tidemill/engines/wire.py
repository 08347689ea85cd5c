"""How a stream of chunks travels over HTTP: frames of a 4-byte big-endian length and that many bytes.

An empty frame says that the engine is still at work. A length with its highest bit set precedes the text of an error
that ends the stream. A stream that ends before a chunk with a stop reason was broken off.
"""

from collections.abc import AsyncIterator

from tidemill.core.errors import EngineError, EngineUnavailable
from tidemill.core.records import decode, encode
from tidemill.core.seams import Chunk

KEEP_ALIVE_S = 5.0
"""The longest that a healthy stream is silent."""
KEEP_ALIVE = bytes(4)

_ERROR_BIT = 1 << 31
_MAX_FRAME_BYTES = 1 << 30


def chunk_frame(chunk: Chunk) -> bytes:
    data = encode(chunk)
    return len(data).to_bytes(4, "big") + data


def error_frame(message: str) -> bytes:
    data = message.encode()
    return (len(data) | _ERROR_BIT).to_bytes(4, "big") + data


async def read_chunks(pieces: AsyncIterator[bytes]) -> AsyncIterator[Chunk]:
    """Chunks up to the one with the stop reason. Raises `EngineUnavailable` for a stream that is broken off or
    damaged, `EngineError` for one that the engine ended with an error."""
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        while len(buffer) >= 4:
            head = int.from_bytes(buffer[:4], "big")
            num_bytes = head & ~_ERROR_BIT
            if num_bytes > _MAX_FRAME_BYTES:
                raise EngineUnavailable(f"the stream announces a frame of {num_bytes} bytes: it is damaged; resume")
            if len(buffer) < 4 + num_bytes:
                break
            data = bytes(buffer[4 : 4 + num_bytes])
            del buffer[: 4 + num_bytes]
            if head & _ERROR_BIT:
                raise EngineError(data.decode(errors="replace"))
            if not data:
                continue
            try:
                chunk = decode(data, Chunk)
            except ValueError as error:
                raise EngineUnavailable(f"the stream is damaged: {error}; resume") from None
            yield chunk
            if chunk.stop_reason is not None:
                return
    raise EngineUnavailable("the stream broke off before its end: resume from the tokens received")
