"""Lines of a growing file, each once."""

import os
from pathlib import Path

from tidemill.core.metrics import MetricsLog
from tidemill.reports.live.tail import Tail


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_each_line_comes_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.read() == ([], False)
    append(path, b"one\ntw")
    assert tail.read() == ([b"one"], True)
    assert tail.read() == ([], False)
    append(path, b"o\nthree\n")
    assert tail.read() == ([b"two", b"three"], False)


def test_a_long_file_is_begun_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append(path, b"".join(b"line %03d\n" % number for number in range(100)))
    tail = Tail(path, max_first_bytes=20)
    assert tail.read() == ([b"line 098", b"line 099"], True)  # what stands of line 097 is none
    append(path, b"more\n")
    assert tail.read() == ([b"more"], False)


def test_a_resumed_learner_takes_rows_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 5):
        log.write({"step": step})
    tail = Tail(path)
    assert len(tail.read()[0]) == 4
    log.truncate_after(2)
    log.write({"step": 3})
    log.close()
    assert tail.read() == ([b'{"step":1}', b'{"step":2}', b'{"step":3}'], True)


def test_a_file_that_goes_away_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append(path, b"one\n")
    tail = Tail(path)
    tail.read()
    os.unlink(path)
    assert tail.read() == ([], True)
    append(path, b"one\n")
    assert tail.read() == ([b"one"], True)
