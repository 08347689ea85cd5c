"""A file of lines that another process appends to, read as it grows."""

import os
from pathlib import Path
from typing import final


@final
class Tail:
    """What was added since the last look. A look at a file that has not grown is one `stat`."""

    def __init__(self, path: Path, *, max_first_bytes: int | None = None) -> None:
        """`max_first_bytes`: how much of the end is read at first; the whole file where it is None."""
        self.path = path
        self._max_first_bytes = max_first_bytes
        self._file_id: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> tuple[list[bytes], bool]:
        """Whole lines since the last look, and whether they begin anew: the file was replaced or cut, as a resumed
        learner does, so that what was read before no longer stands."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            begins = self._file_id is not None
            self._file_id, self._offset = None, 0
            return [], begins
        file_id = (found.st_dev, found.st_ino)
        begins = file_id != self._file_id or found.st_size < self._offset
        is_cut_in_front = False
        if begins:
            self._file_id, self._offset = file_id, 0
            if self._max_first_bytes is not None and found.st_size > self._max_first_bytes:
                self._offset, is_cut_in_front = found.st_size - self._max_first_bytes, True
        if found.st_size == self._offset:
            return [], begins
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(found.st_size - self._offset)
        whole, newline, _ = data.rpartition(b"\n")
        if not newline:  # half a line: the next look sees all of it
            return [], begins
        self._offset += len(whole) + 1
        lines = whole.split(b"\n")
        return lines[1:] if is_cut_in_front else lines, begins
