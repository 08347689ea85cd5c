"""`metrics.jsonl`: a line per update of the learner. What a run claims about its training is read from here."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import final

import msgspec

from tidemill.core.files import drop_cut_off_line, write_whole

Row = dict[str, float | int | str]
"""One update: `step` counts the learner's steps over all stages, from 1; the rest is named figures."""


@final
class MetricsLog:
    """Appends rows to a file that one process writes. A line is written whole.

    Steps increase from line to line: after a resume, call `truncate_after` with the step that was restored, so that a
    step done again stands once.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        rows = read_metrics(path)
        self._last_step = int(rows[-1]["step"]) if rows else 0
        drop_cut_off_line(path)
        self._file = path.open("ab", buffering=0)

    def write(self, row: Mapping[str, float | int | str]) -> None:
        """Raises `ValueError` for a row without an increasing `step`, or with a figure that is not finite."""
        step = row.get("step")
        if not isinstance(step, int) or step <= self._last_step:
            raise ValueError(f"step {step!r} does not follow step {self._last_step}: call truncate_after on a resume")
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key} is {value} at step {step}: leave out what is not known")
        self._file.write(msgspec.json.encode(dict(row)) + b"\n")
        self._last_step = step

    def truncate_after(self, step: int) -> int:
        """Take away the rows of later steps, which will be done again; returns how many there were."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if msgspec.json.decode(line)["step"] <= step]
        if len(kept) < len(lines):
            self._file.close()
            write_whole(self.path, b"".join(kept))
            self._file = self.path.open("ab", buffering=0)
        self._last_step = int(msgspec.json.decode(kept[-1])["step"]) if kept else 0
        return len(lines) - len(kept)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """All rows; none where there is no file yet. A last line cut off by a kill is skipped, any other bad one raises."""
    if not path.exists():
        return []
    rows: list[Row] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # the last piece is empty, or cut off
        try:
            row = msgspec.json.decode(line, type=Row)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(row.get("step"), int):
            raise ValueError(f"{path}, line {number}: no step")
        rows.append(row)
    return rows
