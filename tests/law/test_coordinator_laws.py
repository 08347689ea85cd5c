"""Laws 4, 5 and 6 over any order of completions, deaths, faults, restarts and stragglers."""

import asyncio
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.coordinator_world import config, identity, world
from tidemill.batches.admission import Candidate, compose, num_issuable
from tidemill.core.errors import CoordinatorError
from tidemill.core.journal import read_journal
from tidemill.core.records import Attempt, Batch


class CoordinatorMachine(RuleBasedStateMachine):
    """Workers, a learner and accidents around one coordinator; engines keep up with `min_version`."""

    lagging = False
    """Whether engines may be behind the learner at issue."""

    @initialize(
        size=st.integers(1, 3),
        groups=st.integers(1, 3),
        age=st.integers(0, 3),
        updates=st.integers(1, 6),
        tasks=st.integers(1, 9),
    )
    def start(self, size: int, groups: int, age: int, updates: int, tasks: int) -> None:
        who = identity(rl=tasks, group_size=size, groups_per_batch=groups, max_age=age, num_updates=updates)
        self.context = world(who)
        self.world = self.context.__enter__()
        self.config = who.config
        self.world.store.publish(None)
        self.held: dict[str, list[Attempt]] = {}
        self.instances: Counter[str] = Counter()
        self.finished: set[str] = set()
        self.issued_at: dict[str, int] = {}
        self.trained: list[Batch] = []
        self.num_steps = 0
        self.standing: dict[str, str] = {}
        self.late: list[Attempt] = []

    def teardown(self) -> None:
        if hasattr(self, "context"):
            self.context.__exit__(None, None, None)

    @property
    def version(self) -> int:
        head = self.world.store.head()
        assert head is not None
        return head

    def lease(self, worker: str, num: int) -> list[Attempt]:
        instance = f"{worker}/{self.instances[worker]}"
        taken = asyncio.run(self.world.coordinator.lease(worker, instance, num, 0.0))
        self.held.setdefault(worker, []).extend(taken)
        for attempt in taken:
            assert attempt.id not in self.finished, "a finished episode was run again"
            self.issued_at.setdefault(attempt.group_id, self.version)
            self.standing[attempt.id] = attempt.lease_id
        return taken

    def oldest(self, attempt: Attempt, back: int) -> int:
        """The version that its tokens came from: anything that the worker was allowed to sample from."""
        floor = 0 if self.lagging else attempt.min_version
        return max(floor, self.version - back)

    @rule(worker=st.sampled_from("abc"), num=st.integers(1, 4))
    def work_is_taken(self, worker: str, num: int) -> None:
        self.lease(worker, num)

    @rule(worker=st.sampled_from("abc"), which=st.integers(0, 20), back=st.integers(0, 4), reward=st.integers(0, 2))
    def an_episode_ends(self, worker: str, which: int, back: int, reward: int) -> None:
        if not self.held.get(worker):
            return
        self.end(self.held[worker].pop(which % len(self.held[worker])), back, reward)

    @rule(which=st.integers(0, 20), back=st.integers(0, 4))
    def a_late_result_arrives(self, which: int, back: int) -> None:
        if self.late:
            self.end(self.late.pop(which % len(self.late)), back, 1)

    def end(self, attempt: Attempt, back: int, reward: float) -> None:
        result = self.world.result(attempt, reward=reward, version=self.oldest(attempt, back), newest=self.version)
        taken = asyncio.run(self.world.coordinator.complete(result))
        assert taken == asyncio.run(self.world.coordinator.complete(result)), "a repeated result"
        if taken:
            assert attempt.id not in self.finished
            assert self.standing[attempt.id] == attempt.lease_id, "a result under a lease that no longer stands"
            self.finished.add(attempt.id)

    @rule(worker=st.sampled_from("abc"), which=st.integers(0, 20))
    def the_machine_fails(self, worker: str, which: int) -> None:
        if self.held.get(worker):
            attempt = self.held[worker].pop(which % len(self.held[worker]))
            asyncio.run(self.world.coordinator.complete(self.world.fault(attempt)))

    @rule(worker=st.sampled_from("abc"))
    def a_worker_dies_and_returns(self, worker: str) -> None:
        self.late += self.held.pop(worker, [])
        self.instances[worker] += 1
        self.lease(worker, 1)

    @rule(worker=st.sampled_from("abc"))
    def leases_run_out(self, worker: str) -> None:
        """Of a straggler, whose results may come too late."""
        self.world.clock.now_s += self.config.lease_s + 1
        others = [a.lease_id for name, held in self.held.items() if name != worker for a in held]
        for name in self.held:
            if name != worker:
                asyncio.run(self.world.coordinator.renew(name, f"{name}/{self.instances[name]}", others))
        self.late += self.held.pop(worker, [])

    @rule()
    def the_coordinator_is_killed(self) -> None:
        self.world.restart()

    @rule()
    def the_learner_asks(self) -> None:
        if self.version >= self.config.num_updates:
            return
        batch = asyncio.run(self.world.coordinator.batch(self.version, 0.0))
        if batch is not None:
            self.train(batch)

    def train(self, batch: Batch) -> None:
        assert batch.index == self.version
        assert [a.attempt_id for a in batch.items] == [
            a.attempt_id for a in asyncio.run(self.world.coordinator.batch(batch.index, 0.0)).items
        ]
        groups = Counter(item.group_id for item in batch.items)
        assert len(groups) == self.config.groups_per_batch
        assert set(groups.values()) == {self.config.group_size}, "a group was split"
        for item in batch.items:
            assert batch.index - item.oldest_version <= self.config.max_age, "too old"
            assert item.attempt_id in self.finished
            if self.config.max_age == 0:
                assert self.issued_at[item.group_id] == batch.index, "bound 0 is not the synchronous loop"
        earlier = {item.attempt_id for past in self.trained for item in past.items}
        assert earlier.isdisjoint(item.attempt_id for item in batch.items), "trained twice"
        self.trained.append(batch)
        self.world.store.publish(batch)

    def finish(self) -> None:
        """Whatever happened: workers that go on working bring the run to its end."""
        self.world.clock.now_s += self.config.lease_s + 1
        for _ in range(400):
            if self.version >= self.config.num_updates:
                return
            for attempt in self.lease("z", 4):
                result = self.world.result(attempt, version=max(attempt.min_version, 0))
                assert asyncio.run(self.world.coordinator.complete(result))
                self.finished.add(attempt.id)
            batch = asyncio.run(self.world.coordinator.batch(self.version, 0.0))
            if batch is not None:
                self.train(batch)
        pytest.fail("the learner never got its batch")

    @precondition(lambda self: hasattr(self, "world") and self.num_steps > 30)
    @rule()
    def the_run_can_always_end(self) -> None:
        self.finish()

    @invariant()
    def accounts_close(self) -> None:
        if not hasattr(self, "world"):
            return
        self.num_steps += 1
        status = asyncio.run(self.world.coordinator.status())
        assert status.accepted == status.trained + status.queued + status.rejected
        assert status.trained == len(self.trained) * self.config.groups_per_batch * self.config.group_size
        assert status.halted == ""
        rows = read_journal(self.world.journal)
        finished = {row.id for row in rows.attempts if row.state == "done"}
        assert finished == self.finished, "a finished episode was lost"
        standing = sum(group.state != "rejected" for group in rows.groups)
        assert standing <= min(self.version + self.config.max_age + 1, self.config.num_updates) * (
            self.config.groups_per_batch
        )
        refused = {group.id for group in rows.groups if group.state == "rejected"}
        under_way = {row.group_id for row in rows.attempts if row.state in ("free", "leased")}
        assert refused.isdisjoint(under_way), "work goes on for a rejected group"
        for group in rows.groups:
            assert (group.state == "rejected") == bool(group.reason)
            if group.state == "rejected" and not self.lagging:
                assert group.reason.startswith("tries:"), "rejected by age, though every engine kept up"


class LaggingMachine(CoordinatorMachine):
    """Engines may be behind: groups may then be rejected by age, never trained beyond the bound."""

    lagging = True


TestCoordinator = CoordinatorMachine.TestCase
TestCoordinator.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestLaggingEngines = LaggingMachine.TestCase
TestLaggingEngines.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_group_finds_a_place_by_its_deadline(data: st.DataObject) -> None:
    """Admission alone, with far more groups: whatever finishes first, no group is ever rejected and no batch waits
    for more than its open groups."""
    wanted = config(
        group_size=1,
        groups_per_batch=data.draw(st.integers(1, 5)),
        max_age=data.draw(st.integers(0, 5)),
        num_updates=8,
    )
    standing: dict[str, int] = {}
    open_groups: list[str] = []
    done: set[str] = set()
    placed: set[str] = set()

    def issue(version: int) -> None:
        for _ in range(num_issuable(version=version, num_standing=len(standing), config=wanted)):
            name = str(len(standing))
            standing[name] = version
            open_groups.append(name)

    for version in range(wanted.num_updates):
        issue(version)
        while True:
            candidates = [
                Candidate(
                    id=name,
                    position=int(name),
                    issued_version=issued,
                    oldest_version=issued if name in done else None,
                    complete=name in done,
                )
                for name, issued in standing.items()
                if name not in placed
            ]
            plan = compose(version, candidates, wanted)
            assert plan.rejected == {}
            if plan.chosen is not None:
                break
            assert open_groups, "deadlock: it waits, and nothing is under way"
            assert set(plan.waits_for) <= set(open_groups)
            ended = open_groups.pop(data.draw(st.integers(0, len(open_groups) - 1)))
            done.add(ended)
        assert len(plan.chosen) == wanted.groups_per_batch
        for name in plan.chosen:
            assert version - standing[name] <= wanted.max_age
            assert name in done and name not in placed
            placed.add(name)


def test_a_result_of_an_unknown_attempt_is_refused_aloud() -> None:
    with world() as small:
        small.store.publish(None)
        (attempt,) = asyncio.run(small.coordinator.lease("a", "1", 1, 0.0))
        stranger = Attempt(**{name: getattr(attempt, name) for name in attempt.__struct_fields__} | {"id": "rl-9-0"})
        with pytest.raises(CoordinatorError, match="rl-9-0"):
            asyncio.run(small.coordinator.complete(small.result(stranger)))
