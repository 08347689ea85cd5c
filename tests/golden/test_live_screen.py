"""The live view at fixed widths, as text. Run this file to make the golden files again."""

from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tidemill.core.events import Event
from tidemill.core.journal import JournalCounts
from tidemill.reports.live.facts import Facts
from tidemill.reports.live.screen import duration, screen, sparkline

NOW_S = 1_790_000_000.0
COUNTS = JournalCounts(
    run_id="20261201-010649-a5f3aa",
    config={"max_age": 2, "num_updates": 22},
    halted="",
    demonstrations=(180, 180),
    accepted=1056,
    trained=640,
    queued=404,
    rejected=12,
    leased=48,
    recent_tokens=0,
)
RL = Facts(
    run_id=COUNTS.run_id,
    state="running",
    stage="rl",
    done=14,
    total=22,
    elapsed_s=733.0,
    eta_s=401.0,
    rewards=tuple(0.01 * (number * number % 17) for number in range(60)),
    last={"stage": "rl", "age_p50": 1.0, "age_max": 2.0, "tokens_per_s": 7348.5, "reward_mean": 0.2},
    counts=COUNTS,
    rollout_tokens_per_s=812.3,
    cores={"coordinator": 0.02, "engine": 0.55, "evaluator": 0.1, "learner": 0.92, "worker": 0.61},
    evaluations=((0, 0.05, 40), (8, 0.1, 40), (14, 0.125, 40)),
    news=Event(who="learner-0", what="publish", from_s=NOW_S - 4, to_s=NOW_S - 3, version=14),
    fault=Event(
        who="supervisor-0",
        what="stop",
        from_s=NOW_S - 75,
        to_s=NOW_S - 75,
        ids={"service": "worker-0"},
        numbers={"exit_code": -9},
        note="SIGKILL",
    ),
)
CPT = Facts(
    run_id=COUNTS.run_id,
    state="running",
    stage="cpt",
    done=450,
    total=1200,
    elapsed_s=61.0,
    eta_s=96.0,
    last={"stage": "cpt", "nll": 3.2184, "tokens_per_s": 15_800.0},
    counts=msgspec.structs.replace(
        COUNTS, demonstrations=(31, 180), accepted=0, trained=0, queued=0, rejected=0, leased=0
    ),
    cores={"learner": 0.99},
)
HALTED = Facts(
    run_id=COUNTS.run_id,
    state="halted",
    stage="rl",
    done=14,
    total=22,
    cause="worker-0 ended 11 times within 300 s, last with exit code 1: \x1b[2Jno space left on device (see the log)",
    counts=COUNTS,
)
VIEWS = {"rl": RL, "cpt": CPT, "halted": HALTED}
WIDTHS = (60, 80, 120)


def drawn(facts: Facts, width: int) -> str:
    console = Console(width=width, record=True, color_system=None, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(facts, width=width, now_s=NOW_S))
    return "".join(line.rstrip() + "\n" for line in console.export_text().splitlines())


def golden(name: str, width: int) -> Path:
    return Path(__file__).with_name(f"live_{name}_{width}.txt")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", VIEWS)
def test_the_view_is_the_golden_one(name: str, width: int) -> None:
    text = drawn(VIEWS[name], width)
    assert text == golden(name, width).read_text()
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [1, 20, 30, 45, 200])
def test_any_width_is_drawn(width: int) -> None:
    assert "running" in drawn(RL, max(width, 20))
    drawn(RL, width)


def test_what_others_wrote_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in drawn(HALTED, 80) and "\\x1b[2J" in drawn(HALTED, 80)


def test_a_sparkline_is_the_newest_values() -> None:
    assert sparkline([0.0, 1.0, 0.5], 10) == "▁█▅"
    assert sparkline([9.0, 0.0, 1.0], 2) == "▁█"
    assert sparkline([2.0, 2.0], 5) == "▁▁"
    assert sparkline([], 5) == "" == sparkline([1.0], 0)


def test_durations_are_short() -> None:
    assert [duration(value) for value in (3, 99.4, 125, 5939, 7500)] == ["3 s", "99 s", "2 min", "99 min", "2 h 05"]


if __name__ == "__main__":
    for name, facts in VIEWS.items():
        for width in WIDTHS:
            golden(name, width).write_text(drawn(facts, width))
