"""Events: a line each, whole, also after a kill."""

from pathlib import Path

import pytest

from tidemill.core.events import EventLog, read_events


def test_spans_and_instants_in_order(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "worker-0")
    log.write("episode", from_s=5.0, to_s=9.0, version=3, ids={"attempt": "a"}, numbers={"tokens": 7})
    log.write("start", from_s=1.0, to_s=1.0)
    events = read_events(tmp_path)
    assert [event.what for event in events] == ["start", "episode"]
    assert events[1].ids == {"attempt": "a"}
    assert events[1].numbers == {"tokens": 7}


def test_a_failing_span_says_why_and_raises(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "engine-0")
    with pytest.raises(ValueError, match="broken"), log.span("swap", version=2) as numbers:
        numbers["bytes"] = 12
        raise ValueError("broken")
    (event,) = read_events(tmp_path)
    assert event.note == "ValueError: broken"
    assert event.numbers == {"bytes": 12}
    assert event.to_s >= event.from_s


def test_half_a_line_is_dropped_when_the_service_comes_back(tmp_path: Path) -> None:
    EventLog(tmp_path, "learner-0").write("start")
    path = tmp_path / "learner-0.jsonl"
    with path.open("ab") as file:
        file.write(b'{"who":"learner-0","wh')
    assert len(read_events(tmp_path)) == 1
    EventLog(tmp_path, "learner-0").write("again")
    assert [event.what for event in read_events(tmp_path)] == ["start", "again"]


def test_a_bad_line_inside_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b"nonsense\n{}\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1"):
        read_events(tmp_path)
