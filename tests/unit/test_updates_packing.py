"""Packing: shifted by one, bounded, in order, loud about what is missing."""

import numpy as np
import pytest
import torch

from support.update_samples import trajectory
from tidemill.core.records import ROUTE_SENTINEL, Array, Trajectory
from tidemill.updates.corpus import document
from tidemill.updates.packing import only, pack, pack_demonstrations, pack_text

NAN = float("nan")


def by_hand(attempt_id: str = "a", **changes: Array | float | None) -> Trajectory:
    fields = {
        "token_ids": Array.of([10, 11, 12, 13, 14, 15], "int32"),
        "sampled_mask": Array.of([False, False, True, False, True, False], "bool"),
        "logprobs": Array.of([NAN, NAN, -0.5, NAN, -1.5, NAN], "float32"),
        "versions": Array.of([-1, -1, 3, -1, 4, -1], "int32"),
        "routes": None,
        "temperature": 0.7,
    }
    return Trajectory(attempt_id=attempt_id, segment=0, **(fields | changes))  # type: ignore[arg-type]


def test_a_position_is_fed_a_token_and_predicts_the_next() -> None:
    (packed,) = pack([by_hand()], {"a": 0.5}, max_tokens=100)
    assert packed.tokens_T.tolist() == [10, 11, 12, 13]  # 14 is the last trained one: neither it nor 15 is fed
    assert packed.targets_T.tolist() == [11, 12, 13, 14]
    assert packed.mask_T.tolist() == [False, True, False, True]
    assert packed.behaviour_T[packed.mask_T].tolist() == [-0.5, -1.5]
    assert packed.versions_T.tolist() == [-1, 3, -1, 4]
    assert packed.advantages_T.tolist() == [0.5] * 4
    assert packed.temperature_T.tolist() == pytest.approx([0.7] * 4)
    assert packed.num_trained == 2


def test_every_sequence_has_positions_and_an_owner_of_its_own() -> None:
    rows = [by_hand("a"), by_hand("b"), by_hand("a")]
    (packed,) = pack(rows, {"a": 1.0, "b": -1.0}, max_tokens=12)
    assert packed.positions_T.tolist() == [0, 1, 2, 3] * 3
    assert packed.cu_seqlens == (0, 4, 8, 12)
    assert packed.owners == ("a", "b")
    assert packed.owner_T.tolist() == [0] * 4 + [1] * 4 + [0] * 4
    assert packed.advantages_T.tolist() == [1.0] * 4 + [-1.0] * 4 + [1.0] * 4
    alone = only(packed, "b")
    assert (alone.cu_seqlens, alone.owners, alone.num_tokens) == ((0, 4), ("b",), 4)
    assert only(packed, "a").cu_seqlens == (0, 4, 8)


def test_micro_batches_are_bounded_and_keep_the_order() -> None:
    rows = [trajectory(f"a{i}", i, length=5 + i % 9, tail=i % 2) for i in range(30)]
    packs = pack(rows, {f"a{i}": 1.0 for i in range(30)}, max_tokens=25)
    assert all(packed.num_tokens <= 25 for packed in packs)
    assert len(packs) > 3
    assert [owner for packed in packs for owner in packed.owners] == [f"a{i}" for i in range(30)]
    assert sum(packed.num_trained for packed in packs) == sum(int(row.sampled_mask.numpy().sum()) for row in rows)


def test_routes_go_with_the_positions_that_are_fed() -> None:
    routes = np.arange(6 * 2 * 2).reshape(6, 2, 2)  # every position another row
    rows = [by_hand("a", routes=Array.of(routes, "uint16")), by_hand("b")]
    (packed,) = pack(rows, {"a": 1.0, "b": 1.0}, max_tokens=100)
    assert packed.routes_TLK is not None
    assert torch.equal(packed.routes_TLK[:4], torch.as_tensor(routes[:4], dtype=torch.int32))
    assert bool((packed.routes_TLK[4:] == ROUTE_SENTINEL).all())
    assert pack([rows[1]], {"b": 1.0}, max_tokens=100)[0].routes_TLK is None
    other = by_hand("b", routes=Array.of(np.zeros((6, 3, 2)), "uint16"))
    with pytest.raises(ValueError, match="different models"):
        pack([rows[0], other], {"a": 1.0, "b": 1.0}, max_tokens=100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": Array.of([NAN, NAN, -0.5, NAN, NAN, NAN], "float32")}, "no finite logprob"),
        ({"logprobs": Array.of([NAN, NAN, -0.5, NAN, -np.inf, NAN], "float32")}, "no finite logprob"),
        ({"logprobs": Array.of([NAN, NAN, -0.5], "float32")}, "6 tokens but 3 logprobs"),
        ({"versions": Array.of([3], "int32")}, "6 tokens but 1 versions"),
        ({"sampled_mask": Array.of([True] * 7, "bool")}, "6 tokens but 7 sampled_mask"),
        ({"routes": Array.of(np.zeros((5, 2, 2)), "uint16")}, "6 tokens but 5 routes"),
        (
            {
                "sampled_mask": Array.of([True] * 6, "bool"),
                "logprobs": Array.of([-1.0] * 6, "float32"),
            },
            "nothing precedes it",
        ),
    ],
    ids=["nan", "inf", "logprobs", "versions", "mask", "routes", "first"],
)
def test_what_does_not_fit_together_raises(changes: dict[str, Array], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([by_hand(**changes)], {"a": 1.0}, max_tokens=100)


def test_a_missing_advantage_and_an_overlong_sequence_raise() -> None:
    with pytest.raises(ValueError, match="attempt a has no advantage"):
        pack([by_hand()], {"b": 1.0}, max_tokens=100)
    with pytest.raises(ValueError, match="attempt a has advantage nan"):
        pack([by_hand()], {"a": NAN}, max_tokens=100)
    with pytest.raises(ValueError, match="raise max_pack_tokens"):
        pack([by_hand()], {"a": 1.0}, max_tokens=3)


def test_a_trajectory_that_trains_nothing_is_left_out() -> None:
    nothing = by_hand(sampled_mask=Array.of([False] * 6, "bool"))
    assert pack([nothing], {"a": 1.0}, max_tokens=100) == []


def test_demonstrations_need_no_logprobs_and_replay_no_routes() -> None:
    row = by_hand(
        logprobs=Array.of([NAN] * 6, "float32"), routes=Array.of(np.zeros((6, 2, 2)), "uint16"), temperature=0.0
    )
    (packed,) = pack_demonstrations([row], {"a": 0.25}, max_tokens=100)
    assert packed.routes_TLK is None
    assert packed.weights_T.tolist() == [0.25] * 4
    assert packed.temperature_T.tolist() == [1.0] * 4
    assert pack_demonstrations([row], max_tokens=100)[0].weights_T.tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="give 0 or more"):
        pack_demonstrations([row], {"a": -1.0}, max_tokens=100)


def test_text_pieces_are_apart_and_weighted_by_the_token_that_is_predicted() -> None:
    row = (document([1, 2, 3], [9.0, 0.0, 0.5]), document([4]), document([5, 6]))
    (packed,) = pack_text([row], max_tokens=100)
    assert packed.tokens_T.tolist() == [1, 2, 5]
    assert packed.targets_T.tolist() == [2, 3, 6]
    assert packed.mask_T.tolist() == [False, True, True]
    assert packed.weights_T.tolist() == [0.0, 0.5, 1.0]
    assert packed.cu_seqlens == (0, 2, 3)
