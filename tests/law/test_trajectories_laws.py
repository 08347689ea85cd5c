"""Laws 1 and 5: training ids are the sampled ids, and every sampled token is trained exactly once."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.records import ROUTE_SENTINEL, Array, Episode, Generation, Segment, Step
from tidemill.trajectories.build import trajectories

SHAPE = (2, 2)


def generation(
    position: int, prompt: list[int], sampled: list[int], *, version: int = 0, row_start: int = 0, num_rows: int = 0
) -> Generation:
    rows = np.arange(num_rows)[:, None, None] + np.full((num_rows, *SHAPE), 100 * (version + 1))
    return Generation(
        position=position,
        prompt_ids=Array.of(prompt, "int32"),
        token_ids=Array.of(sampled, "int32"),
        logprobs=Array.of([-0.25 * (number + 1) for number in range(len(sampled))], "float32"),
        versions=Array.of([version] * len(sampled), "int32"),
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        support_ids=None,
        support_offsets=None,
        row_start=row_start,
        kv_versions=Array.of([version] * num_rows, "int32"),
        routes=Array.of(rows, "uint16"),
        stop_reason="stop",
        engine="e",
    )


def segment(generations: list[Generation], closing: list[int] | None = None) -> Segment:
    steps = tuple(Step(generation=item, text="", calls=(), observations=()) for item in generations)
    return Segment(steps=steps, opened_by="start", closing_ids=Array.of(closing or [], "int32"))


def episode(segments: list[Segment]) -> Episode:
    return Episode(
        attempt_id="a",
        group_id="g",
        task_id="t",
        stage="rl",
        seed=0,
        segments=tuple(segments),
        outcome="submitted",
        reward=0.0,
        rewards={},
        measures={},
        verdict={},
        patch={},
        events=(),
        timings_s={},
        cpu_s={},
        harness_hash="h",
        reward_version="r",
        sandbox_tier="none",
    )


ids = st.lists(st.integers(0, 99), max_size=6)
parts = st.lists(st.tuples(ids, ids), min_size=1, max_size=4)


def chain(turns: list[tuple[list[int], list[int]]], first_version: int = 0) -> list[Generation]:
    position, made = 0, []
    for number, (prompt, sampled) in enumerate(turns):
        whole = position + len(prompt) + len(sampled)
        num_rows = max(0, whole - 1)
        made.append(generation(position, prompt, sampled, version=first_version + number, num_rows=num_rows))
        position = whole
    return made


@settings(deadline=None)
@given(parts, ids)
def test_a_segment_is_its_ids_and_every_sampled_token_is_trained_once(
    turns: list[tuple[list[int], list[int]]], closing: list[int]
) -> None:
    generations = chain(turns)
    (trajectory,) = trajectories(episode([segment(generations, closing)]))
    expected = [id_ for prompt, sampled in turns for id_ in prompt + sampled] + closing
    mask = trajectory.sampled_mask.numpy()
    assert trajectory.token_ids.numpy().tolist() == expected
    assert mask.sum() == sum(len(sampled) for _, sampled in turns)
    assert trajectory.token_ids.numpy()[mask].tolist() == [id_ for _, sampled in turns for id_ in sampled]
    assert np.array_equal(np.isnan(trajectory.logprobs.numpy()), ~mask)
    assert np.array_equal(trajectory.versions.numpy() == -1, ~mask)
    sampled_logprobs = [value for item in generations for value in item.logprobs.numpy().tolist()]
    assert trajectory.logprobs.numpy()[mask].tolist() == sampled_logprobs
    assert trajectory.routes is not None and trajectory.routes.shape == (len(expected), *SHAPE)


@settings(deadline=None)
@given(parts, parts, parts, st.data())
def test_a_branch_masks_what_the_first_trajectory_trains(
    shared: list[tuple[list[int], list[int]]],
    left: list[tuple[list[int], list[int]]],
    right: list[tuple[list[int], list[int]]],
    data: st.DataObject,
) -> None:
    branches = [
        segment(chain(shared + left)),
        segment(chain([*shared, ([100], [101]), *right])),
        segment(chain([*shared, ([100], [102])])),
    ]
    order = data.draw(st.permutations(branches))
    built = trajectories(episode(order))
    total = sum(int(item.sampled_mask.numpy().sum()) for item in built)
    num_shared, num_left, num_right = (sum(len(sampled) for _, sampled in turns) for turns in (shared, left, right))
    assert total == num_shared + num_left + num_right + 2
    assert int(built[0].sampled_mask.numpy().sum()) >= num_shared


def test_earlier_rows_stand_and_unknown_positions_hold_the_sentinel() -> None:
    first = generation(0, [1, 2], [3, 4], version=0, num_rows=3)
    second = generation(4, [5], [6, 7], version=1, num_rows=6)
    (trajectory,) = trajectories(episode([segment([first, second], closing=[8])]))
    assert trajectory.routes is not None
    rows = trajectory.routes.numpy()[:, 0, 0].tolist()
    assert rows == [100, 101, 102, 203, 204, 205, ROUTE_SENTINEL, ROUTE_SENTINEL]


def test_a_resumed_engine_that_reports_only_new_rows_fits_in() -> None:
    first = generation(0, [1, 2], [3], version=0, num_rows=2)
    second = generation(3, [5], [6], version=1, row_start=2, num_rows=2)
    (trajectory,) = trajectories(episode([segment([first, second])]))
    assert trajectory.routes is not None
    assert trajectory.routes.numpy()[:, 0, 0].tolist() == [100, 101, 200, 201, ROUTE_SENTINEL]


def broken(**changes: object) -> Generation:
    return msgspec.structs.replace(generation(0, [1], [2, 3]), **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logprobs": Array.of([-1.0], "float32")}, "none may be missing"),
        ({"versions": Array.of([0], "int32")}, "none may be missing"),
        ({"logprobs": Array.of([-1.0, np.nan], "float32")}, "no finite logprob"),
        ({"position": 1}, "expected 0"),
        ({"row_start": 2, "routes": Array.of(np.zeros((2, 1, 1)), "uint16")}, "routes of positions"),
    ],
)
def test_what_does_not_fit_raises(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        trajectories(episode([segment([broken(**changes)])]))
