"""What an agent did, read from its episode."""

import msgspec
import pytest

from support.episode_parts import ATTEMPT, Echo, echo_task, play, say
from tidemill.core.records import Episode, Observation, ToolCall
from tidemill.episodes.scripted import ScriptedEngine, script_of
from tidemill.reports.behaviour import behaviours

OK, BAD, EDIT, REFUSED = ("test", "passed"), ("test", "failed: x"), ("edit", "3|y"), ("edit", "refused: no")
UNDO, NO_UNDO = ("undo", "taken back"), ("undo", "refused: no")


def episode(steps: list[tuple[str, str]], *, solved: bool) -> Episode:
    """One call a step, with what it brought."""
    played = play(ScriptedEngine(script_of([say("submit")])), Echo(), echo_task(), attempt=ATTEMPT)
    (segment,) = played.segments
    made = tuple(
        msgspec.structs.replace(
            segment.steps[0],
            calls=(ToolCall(id="c", name=name, arguments={}),),
            observations=(
                Observation(call_id="c", text=text, error="refused" if text.startswith("refused") else None),
            ),
        )
        for name, text in steps
    )
    return msgspec.structs.replace(
        played, segments=(msgspec.structs.replace(segment, steps=made),), measures={"solved": float(solved)}
    )


@pytest.mark.parametrize(
    "steps, solved, expected",
    [
        ([EDIT, BAD, EDIT, OK], True, "tested_an_edit test_told_wrong tried_again corrected_itself"),
        ([EDIT, BAD, EDIT, BAD], False, "tested_an_edit test_told_wrong tried_again"),
        ([EDIT, OK], True, "tested_an_edit"),
        ([BAD, EDIT], True, ""),  # the failure was there from the start: nothing of its own was corrected
        ([EDIT, BAD, REFUSED], False, "tested_an_edit test_told_wrong"),
        ([REFUSED, BAD, EDIT], True, ""),
        ([EDIT], True, ""),
        ([EDIT, UNDO, BAD, EDIT], True, ""),  # it tested what it was given
        ([EDIT, EDIT, UNDO, BAD], False, "tested_an_edit test_told_wrong"),
        ([EDIT, BAD, UNDO, EDIT, OK], True, "tested_an_edit test_told_wrong tried_again corrected_itself"),
        ([NO_UNDO, EDIT, BAD], False, "tested_an_edit test_told_wrong"),
        ([], False, ""),
    ],
)
def test_behaviours(steps: list[tuple[str, str]], solved: bool, expected: str) -> None:
    found = behaviours(episode(steps, solved=solved))
    assert {name for name, value in found.items() if value} == set(expected.split())
    assert set(found.values()) <= {0.0, 1.0}
