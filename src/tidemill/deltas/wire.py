"""Small things of the format: variable-length numbers, and a reader that never runs past the end."""

from tidemill.core.errors import DeltaError


def varint(number: int) -> bytes:
    """LEB128: seven bits a byte, least significant first; the top bit says that more follow."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


class Reader:
    """Reads forward; raises `DeltaError` where the data ends too early."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise DeltaError("damaged delta: a part ends too early")
        self._at, start = end, self._at
        return bytes(self._data[start:end])

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        number = 0
        for shift in range(0, 63, 7):
            byte = self.byte()
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
        raise DeltaError("damaged delta: a number is too long")

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)
