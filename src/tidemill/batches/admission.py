"""Admission: how many groups may be under way, and which ones make up batch k. Pure functions; the journal holds state.

Legend: k index of the batch that the learner at version k asks for; B groups per batch; η the bound on age
(`max_age`). A group issued at version v may be trained up to batch v + η, its *deadline*: no token of it is then
older than η versions.

Two rules keep that promise without ever throwing work away:

- capacity (AReaL, arXiv 2505.24298, section 5.1): at version v, at most (v + η + 1)·B groups stand (issued and not
  rejected). So those not yet in a batch number at most (η + 1)·B.
- places: batch k must leave few enough groups behind that each still finds a place by its deadline. For every j ≥ k,
  of the U_j unplaced groups with deadline ≤ j at most (j − k)·B may be left, so at least r_j = U_j − (j − k)·B go into
  batch k. At j = k this is "what would expire goes in"; looking further ahead stops early finishers from filling
  the batches until more groups expire at once than one batch holds. Where fewer than r_j of them are done, the learner
  waits: rejecting by age would remove the long episodes.

From both: U_j ≤ (j − k + 1)·B at every k, so a batch that meets all r_j exists as soon as its groups are done.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LOSSES_PER_TRY = 4
"""A lease lost with its worker is weaker evidence against a task than an `env_fault`, but it is not none: a task that
kills every worker must not hold the learner up for ever."""


@dataclass(frozen=True, kw_only=True)
class AdmissionConfig:
    """How work is issued and gathered."""

    group_size: int
    """Attempts at one task, G."""
    groups_per_batch: int
    max_age: int
    """η: versions between the oldest sampled token of an episode and the learner that trains it. 0: synchronous."""
    num_updates: int
    """RL updates of the run: it is finished when this version exists."""
    num_demonstrations_per_task: int
    """Attempts per SFT task; 0 skips the stage."""
    lease_s: float = 60.0
    """A lease that is not renewed for so long may be taken back."""
    max_tries: int = 3
    """`env_fault`s of one attempt before its group is rejected."""
    shuffled_rewards: bool = False
    """A control: see `advantages.shuffled_rewards`. Here because the journal keeps this record for the audit."""

    def __post_init__(self) -> None:
        for name in ("group_size", "groups_per_batch", "max_tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: at least 1")
        for name in ("max_age", "num_updates", "num_demonstrations_per_task"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: at least 0")
        if not self.lease_s > 0:
            raise ValueError(f"lease_s is {self.lease_s}: more than 0")

    @property
    def max_losses(self) -> int:
        """Leases of one attempt lost with their worker before its group is rejected."""
        return self.max_tries * LOSSES_PER_TRY


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A group that is in no batch yet."""

    id: str
    position: int
    """In order of issue."""
    issued_version: int
    oldest_version: int | None
    """Smallest version sampled from so far; None where nothing was sampled yet."""
    complete: bool

    def late(self) -> bool:
        """Sampled from an engine that was behind the learner when the group was issued."""
        return self.oldest_version is not None and self.oldest_version < self.issued_version

    def deadline(self, max_age: int) -> int:
        """The last batch that may hold it."""
        oldest = self.issued_version if self.oldest_version is None else min(self.issued_version, self.oldest_version)
        return oldest + max_age


@dataclass(frozen=True, kw_only=True)
class Composition:
    """What is to be done about batch k."""

    rejected: dict[str, str]
    """Group → reason. Only groups that were sampled from an engine behind the learner can be among them."""
    chosen: tuple[str, ...] | None
    """Groups of the batch, in order of issue; None where it must wait."""
    waits_for: tuple[str, ...]
    """Open groups whose end the batch waits for, or none where it waits for any."""


def num_issuable(*, version: int, num_standing: int, config: AdmissionConfig) -> int:
    """How many new groups may be issued at a version. `num_standing`: groups issued so far and not rejected."""
    batches = min(version + config.max_age + 1, config.num_updates)
    return max(0, batches * config.groups_per_batch - num_standing)


def compose(index: int, candidates: Sequence[Candidate], config: AdmissionConfig) -> Composition:
    """Choose the groups of batch `index`, or say what it waits for. See the top of the module for the rule."""
    places = config.groups_per_batch
    rejected = _reject_what_has_no_place(index, candidates, config)
    groups = sorted(
        (group for group in candidates if group.id not in rejected),
        key=lambda group: (group.deadline(config.max_age), group.position),
    )
    done = [group for group in groups if group.complete]
    waits_for: list[str] = []
    for deadline in sorted({group.deadline(config.max_age) for group in groups}):
        due = [group for group in groups if group.deadline(config.max_age) <= deadline]
        needed = len(due) - (deadline - index) * places
        if sum(group.complete for group in due) < needed:
            waits_for = [group.id for group in due if not group.complete]
            break
    if waits_for or len(done) < places:
        return Composition(rejected=rejected, chosen=None, waits_for=tuple(waits_for))
    # The earliest deadlines among the done: this takes min(B, done_j) of those due by j for all j at once.
    chosen = sorted(done[:places], key=lambda group: group.position)
    return Composition(rejected=rejected, chosen=tuple(group.id for group in chosen), waits_for=())


def _reject_what_has_no_place(index: int, candidates: Sequence[Candidate], config: AdmissionConfig) -> dict[str, str]:
    """Groups that cannot be trained in time. There are none while engines are not behind at issue; where some are, the
    groups sampled from them give way (the last issued first), so that no other group loses its place."""
    rejected: dict[str, str] = {}
    for deadline in sorted({group.deadline(config.max_age) for group in candidates}):
        limit = max(0, (deadline - index + 1) * config.groups_per_batch)
        due = [g for g in candidates if g.deadline(config.max_age) <= deadline and g.id not in rejected]
        due.sort(key=lambda group: (not group.late(), -group.position))
        for group in due[: max(0, len(due) - limit)]:
            oldest = group.issued_version if group.oldest_version is None else group.oldest_version
            rejected[group.id] = (
                f"age: sampled at version {oldest}, issued at {group.issued_version}, no place by batch "
                f"{group.deadline(config.max_age)} under the bound {config.max_age}"
            )
    return rejected
