"""Coordinator: restarts, epochs, late engines, poisonous tasks, a store that lost versions."""

import asyncio

import pytest

from support.coordinator_world import identity, world
from tidemill.batches.admission import LOSSES_PER_TRY, AdmissionConfig, Candidate, compose
from tidemill.batches.advantages import shuffled_rewards
from tidemill.batches.schema import attempt_seed
from tidemill.core.errors import TrainingHalted
from tidemill.core.journal import read_journal


def test_after_a_restart_everything_goes_on_from_the_files() -> None:
    """Counts and capacity come back with the version, leases stand, consumed tasks stay consumed."""
    with world() as small:
        small.store.publish(None)
        done, held, *_ = asyncio.run(small.coordinator.lease("w", "1", 4, 0.0))
        assert asyncio.run(small.coordinator.complete(small.result(done)))
        before = asyncio.run(small.coordinator.status())
        small.clock.now_s += 1000  # it was away for longer than any lease
        small.restart()
        assert asyncio.run(small.coordinator.status()) is not before
        after = asyncio.run(small.coordinator.status())
        for name in ("version", "issued", "accepted", "queued", "leased"):
            assert getattr(after, name) == getattr(before, name)
        assert asyncio.run(small.coordinator.complete(small.result(done))), "told again after the restart"
        others = asyncio.run(small.coordinator.lease("v", "1", 100, 0.0))
        assert held.id not in [a.id for a in others], "its worker may still be at it"
        assert [a.task_id for a in others] == ["task-2", "task-2", "task-3", "task-3"]
        assert asyncio.run(small.coordinator.complete(small.result(held)))


@pytest.mark.parametrize("restart_after", [0, 1, 2, 3, 4, 5])
def test_tasks_go_round_in_order_whenever_it_is_restarted(restart_after: int) -> None:
    """Three tasks, five groups: at, before and after the end of an epoch."""
    who = identity(rl=3, group_size=1, groups_per_batch=1, max_age=0, num_updates=5)
    seen: list[tuple[str, int]] = []
    with world(who) as small:
        small.store.publish(None)
        for index in range(5):
            if index == restart_after:
                small.restart()
            (attempt,) = asyncio.run(small.coordinator.lease("w", str(index), 9, 0.0))
            seen.append((attempt.task_id, attempt.seed))
            asyncio.run(small.coordinator.complete(small.result(attempt)))
            if index == restart_after:
                small.restart()
            batch = asyncio.run(small.coordinator.batch(index, 0.0))
            assert batch is not None
            small.store.publish(batch)
        assert [group.epoch for group in read_journal(small.journal).groups] == [0, 0, 0, 1, 1]
    assert [task for task, _ in seen] == ["task-0", "task-1", "task-2", "task-0", "task-1"]
    assert [seed for _, seed in seen] == [attempt_seed(7, f"rl-{i:06d}-0") for i in range(5)]
    assert len({seed for _, seed in seen}) == 5


def test_a_batch_is_the_same_for_ever() -> None:
    with world(identity(group_size=1, groups_per_batch=1)) as small:
        small.store.publish(None)
        first, second = asyncio.run(small.coordinator.lease("w", "1", 2, 0.0))
        asyncio.run(small.coordinator.complete(small.result(second)))
        batch = asyncio.run(small.coordinator.batch(0, 0.0))
        assert batch is not None
        asyncio.run(small.coordinator.complete(small.result(first)))
        small.restart()
        again = asyncio.run(small.coordinator.batch(0, 0.0))
        assert again is not None and [i.attempt_id for i in again.items] == [second.id]


def test_a_control_deals_rewards_out_anew_and_keeps_the_true_ones_beside_them() -> None:
    who = identity(group_size=2, groups_per_batch=4, shuffled_rewards=True)
    with world(who) as small:
        small.store.publish(None)
        leases = asyncio.run(small.coordinator.lease("w", "1", 8, 0.0))
        for number, lease in enumerate(leases):
            asyncio.run(small.coordinator.complete(small.result(lease, reward=float(number))))
        batch = asyncio.run(small.coordinator.batch(0, 0.0))
    assert batch is not None
    assert [item.reward for item in batch.items] == [float(number) for number in range(8)]
    dealt = shuffled_rewards(range(8), seed=who.seed, index=0)
    means = [(dealt[2 * k] + dealt[2 * k + 1]) / 2 for k in range(4)]
    assert [item.advantage for item in batch.items] == [dealt[i] - means[i // 2] for i in range(8)]


def test_the_learner_waits_for_a_straggler_that_would_expire() -> None:
    """Bound 1: group 0, issued at version 0, must be in batch 0 or 1, however many others are done."""
    with world(identity(group_size=1, groups_per_batch=1)) as small:
        small.store.publish(None)
        straggler, quick = asyncio.run(small.coordinator.lease("w", "1", 9, 0.0))
        asyncio.run(small.coordinator.complete(small.result(quick)))
        batch = asyncio.run(small.coordinator.batch(0, 0.0))
        assert batch is not None
        small.store.publish(batch)
        (third,) = asyncio.run(small.coordinator.lease("w", "1", 9, 0.0))
        assert asyncio.run(small.coordinator.complete(small.result(third)))
        assert asyncio.run(small.coordinator.batch(1, 0.0)) is None
        assert asyncio.run(small.coordinator.complete(small.result(straggler)))
        batch = asyncio.run(small.coordinator.batch(1, 0.0))
        assert batch is not None and [i.attempt_id for i in batch.items] == [straggler.id]


def test_an_engine_that_was_behind_costs_its_group_a_recorded_reason() -> None:
    """Bound 0 at version 1, sampled at version 0: too old, and replaced."""
    with world(identity(group_size=1, groups_per_batch=1, max_age=0)) as small:
        small.store.publish(None)
        (first,) = asyncio.run(small.coordinator.lease("w", "1", 1, 0.0))
        asyncio.run(small.coordinator.complete(small.result(first)))
        batch = asyncio.run(small.coordinator.batch(0, 0.0))
        assert batch is not None
        small.store.publish(batch)
        (late,) = asyncio.run(small.coordinator.lease("w", "1", 1, 0.0))
        assert late.min_version == 1
        assert asyncio.run(small.coordinator.complete(small.result(late, version=0, newest=1)))
        assert asyncio.run(small.coordinator.batch(1, 0.0)) is None
        rejected = read_journal(small.journal).groups[1]
        assert rejected.state == "rejected" and rejected.reason.startswith("age: sampled at version 0, issued at 1")
        status = asyncio.run(small.coordinator.status())
        assert (status.accepted, status.trained, status.rejected) == (2, 1, 1)
        (replacement,) = asyncio.run(small.coordinator.lease("w", "1", 1, 0.0))
        assert asyncio.run(small.coordinator.complete(small.result(replacement)))
        assert asyncio.run(small.coordinator.batch(1, 0.0)) is not None


def test_a_swap_in_the_middle_of_an_episode_does_not_age_it_more() -> None:
    """Attributed to the oldest version sampled from, not to the newest, nor to the engine's at the end."""
    with world(identity(group_size=1, groups_per_batch=1, max_age=1)) as small:
        small.store.publish(None)
        (attempt, _) = asyncio.run(small.coordinator.lease("w", "1", 2, 0.0))
        asyncio.run(small.coordinator.complete(small.result(attempt, version=0, newest=5)))
        batch = asyncio.run(small.coordinator.batch(0, 0.0))
        assert batch is not None and batch.items[0].oldest_version == 0


def test_a_task_that_kills_every_worker_does_not_hold_the_learner_for_ever() -> None:
    with world(identity(group_size=1, groups_per_batch=1, max_age=0, max_tries=1)) as small:
        small.store.publish(None)
        for instance in range(LOSSES_PER_TRY):
            (attempt,) = asyncio.run(small.coordinator.lease("w", str(instance), 1, 0.0))
            assert attempt.task_id == "task-0" and attempt.try_index == instance
        (attempt,) = asyncio.run(small.coordinator.lease("w", "last", 1, 0.0))
        assert attempt.task_id == "task-1"
        rows = read_journal(small.journal)
        assert "0 env_faults, 4 lost leases" in rows.groups[0].reason
        assert [t.how for t in rows.tries] == ["superseded"] * LOSSES_PER_TRY


def test_a_demonstration_that_cannot_run_is_left_out_with_its_reason() -> None:
    with world(identity(sft=2, num_demonstrations_per_task=1, max_tries=1)) as small:
        good, bad = asyncio.run(small.coordinator.lease("w", "1", 2, 0.0))
        assert asyncio.run(small.coordinator.complete(small.fault(bad, "no such package")))
        assert asyncio.run(small.coordinator.complete(small.result(good, version=-1)))
        results = asyncio.run(small.coordinator.demonstrations(0.0))
        assert results is not None and [r.attempt_id for r in results] == [good.id]
        status = asyncio.run(small.coordinator.status())
        assert (status.accepted, status.queued, status.rejected) == (2, 1, 1)
        assert read_journal(small.journal).groups[1].reason == "tries: every attempt failed"


def test_a_run_without_demonstrations_has_none_to_wait_for() -> None:
    with world() as small:
        assert asyncio.run(small.coordinator.demonstrations(0.0)) == []


def test_a_store_that_lost_versions_halts() -> None:
    with world(identity(group_size=1, groups_per_batch=1)) as small:
        small.store.publish(None)
        for index in range(2):
            (attempt, *_) = asyncio.run(small.coordinator.lease("w", "1", 1, 0.0))
            asyncio.run(small.coordinator.complete(small.result(attempt)))
            batch = asyncio.run(small.coordinator.batch(index, 0.0))
            assert batch is not None
            if index == 0:
                small.store.publish(batch)
        del small.store.versions[1:]
        with pytest.raises(TrainingHalted, match="put the store's versions back"):
            asyncio.run(small.coordinator.batch(1, 0.0))


def test_early_finishers_do_not_crowd_out_what_is_still_under_way() -> None:
    """Bound 2, two places: six groups of version 0; if the next two batches took others, four would expire at once."""
    wanted = AdmissionConfig(group_size=1, groups_per_batch=2, max_age=2, num_updates=9, num_demonstrations_per_task=0)
    groups = [
        Candidate(id=str(i), position=i, issued_version=0, oldest_version=0 if i > 3 else None, complete=i > 3)
        for i in range(6)
    ]
    plan = compose(0, groups, wanted)
    assert plan.chosen == ("4", "5")
    left = groups[:4]
    newer = [Candidate(id=str(i), position=i, issued_version=1, oldest_version=1, complete=True) for i in range(6, 8)]
    plan = compose(1, left + newer, wanted)
    assert plan.chosen is None and plan.rejected == {}
    assert plan.waits_for == ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 0}, "group_size is 0"),
        ({"groups_per_batch": 0}, "groups_per_batch is 0"),
        ({"max_age": -1}, "max_age is -1"),
        ({"lease_s": 0.0}, "lease_s is 0"),
        ({"max_tries": 0}, "max_tries is 0"),
        ({"rl": 0}, "no RL task"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        identity(**change)  # type: ignore[arg-type]
