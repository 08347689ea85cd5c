"""From a folder whose tests fail to a verified patch, with the harness, the tools and the sandboxes of training."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import msgspec

from tidemill.core.blobs import MemoryBlobs, put_record
from tidemill.core.errors import SandboxFault, TaskError, UsageError
from tidemill.core.records import Attempt, Episode, Layer, Task, digest
from tidemill.core.seams import Engine, SandboxTier
from tidemill.episodes.conduct import HarnessConfig
from tidemill.episodes.grading import Grader
from tidemill.episodes.harness import run_episode
from tidemill.episodes.mend import PASSED, TOOLS, MendEnvironment
from tidemill.run.agent.narration import NarratedEnvironment, NarratedRenderer, Say
from tidemill.run.agent.patch import path_inside
from tidemill.run.policy import Policy
from tidemill.run.services.rollouts import sampling_of, within_context
from tidemill.tasks.broken import Diagnosis, Suspect, broken_by, diagnose, matching_tests, suspects, task_of
from tidemill.tasks.build import BuiltTask
from tidemill.tasks.commands import read_folder
from tidemill.tasks.layout import Layout
from tidemill.tasks.manifest import layer_of
from tidemill.tasks.packages import PackagePin
from tidemill.tasks.vault import MemoryVault

MAX_SUSPECTS = 3
"""Of several functions that are under the same suspicion, so many take turns."""
GRADE_S, GRADE_CPU_S = 60.0, 30
"""More than in training: a user's tests are what they are."""
HARNESS = HarnessConfig(engine_patience_s=5.0)
"""The engine is in this process: where it goes away, it does not come back."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the user asks for."""

    repo: Path
    file: str | None = None
    function: str | None = None
    test: str | None = None
    requires: Sequence[str] = ()
    tries: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise UsageError(f"--tries {self.tries}: give 1 or more")


@dataclass(frozen=True, kw_only=True)
class Mended:
    """A file as it was read, and as it should be; all tests were run on it in a fresh sandbox."""

    path: str
    before: bytes
    after: bytes


@final
@dataclass(frozen=True, kw_only=True)
class Bench:
    """A folder's tests, tasks and sandboxes."""

    found: Diagnosis
    policy: Policy
    engine: Engine
    tier: SandboxTier
    say: Say
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    failures: dict[str, str] = field(default_factory=dict)
    """What the shown checks said of a version of the file: the next attempt at it need not ask again."""

    def environment(self, built: BuiltTask) -> MendEnvironment:
        layers = {digest(self.found.layer): self.found.layer}
        grader = Grader(
            self.tier,
            MemoryVault([built.verifier]),
            self.blobs,
            layers,
            timeout_s=GRADE_S,
            cpu_limit_s=GRADE_CPU_S,
            cross_check=False,
        )
        return MendEnvironment(self.tier, blobs=self.blobs, layers=layers, grader=grader, failures=self.failures)

    def task(self, built: BuiltTask) -> Task:
        repository, layer = put_record(self.blobs, built.workspace), digest(self.found.layer)
        return within_context(
            msgspec.structs.replace(built.task, repository=repository, layer=layer), self.policy.recipe
        )

    async def check_opening(self, built: BuiltTask) -> None:
        """Raises `UsageError` where the policy could not play this task at all."""
        environment, task = self.environment(built), self.task(built)
        try:
            text = await environment.open(task)
        finally:
            await environment.close()
        name = task.data["function"]
        if self.failures and set(self.failures.values()) == {PASSED}:
            raise UsageError(
                f"{', '.join(task.shown_checks)} fails among all tests and passes alone: make it independent of the "
                "others first"
            )
        num, most = len(self.policy.renderer().open(TOOLS, text)), task.limits.max_context_tokens
        if num >= most:
            raise UsageError(
                f"{name} and what its tests say are {num} tokens, and this policy reads {most}: name a shorter "
                "--function, or train with a larger policy.max_context_tokens"
            )

    async def play(self, built: BuiltTask, attempt: Attempt) -> Episode:
        """Raises `SandboxFault` where the machine failed, not the agent."""
        episode = await run_episode(
            self.task(built),
            attempt=attempt,
            environment=NarratedEnvironment(self.environment(built), self.say),
            renderer=NarratedRenderer(self.policy.renderer(), self.say),
            engine=self.engine,
            sampling=sampling_of(self.policy.recipe),
            engine_name="agent",
            config=HARNESS,
            sandbox_tier=self.tier.tier,
        )
        if episode.outcome == "env_fault":
            faults = [event.detail for event in episode.events if event.what == "fault"]
            raise SandboxFault(f"the attempt could not be played: {faults[-1] if faults else 'no reason given'}")
        return episode


async def mend(order: Order, policy: Policy, engine: Engine, tier: SandboxTier, say: Say) -> Mended | None:
    """None where no attempt was good. Raises `UsageError` for a folder in which there is nothing to mend this way."""
    pin, layout, layer = read_order(order)
    found = await diagnose(pin, layout, layer, tier)
    chosen = choose(found, order)
    say(f"tests     {len(found.failing)} of {len(found.statuses)} fail{_and_errors(found)}")
    bench = Bench(found=found, policy=policy, engine=engine, tier=tier, say=say)
    tasks = [task_of(found, suspect) for suspect in chosen]
    for suspect, built in zip(chosen, tasks, strict=True):
        _introduce(suspect, built.task, policy, say)
        await bench.check_opening(built)
    for number in range(order.tries):
        built = tasks[number % len(tasks)]
        say(f"try {number + 1} of {order.tries}: {built.task.data['function']}")
        episode = await bench.play(built, _attempt(order, built.task, number))
        path = str(built.task.data["path"])
        after = episode.patch.get(path)
        if episode.measures.get("solved", 0.0) < 1.0 or after is None:
            say(f"  not mended ({episode.outcome})")
            continue
        say(f"  its tests pass in a fresh sandbox ({episode.outcome})")
        broken, num_passing = await broken_by(found, path, after.decode("utf-8"), tier)
        if not broken:
            say(f"mended    all tests were run again: {num_passing} of {len(found.statuses)} pass, none is worse")
            return Mended(path=path, before=layout.sources[path].encode("utf-8"), after=after)
        say(f"  but {len(broken)} tests that passed before do not pass now, such as {broken[0]}")
    return None


def read_order(order: Order) -> tuple[PackagePin, Layout, Layer]:
    """Package, files and sandbox layer of the folder. Raises `UsageError`."""
    try:
        if not order.repo.is_dir():
            raise UsageError(f"--repo {str(order.repo)!r} is no folder")
        pin, layout = read_folder(order.repo)
        return pin, layout, layer_of([*pin.requires, *order.requires])
    except TaskError as error:
        raise UsageError(str(error)) from error


def choose(found: Diagnosis, order: Order) -> list[Suspect]:
    """The functions to mend: the most suspicious one, or those that no test tells apart. Raises `UsageError`."""
    path = None if order.file is None else path_inside(order.repo, order.file)
    if path is not None and path not in found.layout.sources:
        raise UsageError(f"--file {order.file!r} is no module of the package in {order.repo}: give one, not a test")
    ranked = suspects(found, None if order.test is None else matching_tests(found, order.test))
    if not ranked:
        raise UsageError(
            f"{order.repo}: the failing tests reach no function of the package, such as {found.failing[0]}"
        )
    left = [
        one
        for one in ranked
        if (path is None or one.path == path)
        and (order.function is None or f".{one.qualname}".endswith(f".{order.function}"))
    ]
    if not left:
        some = ", ".join(f"{one.qualname} in {one.path}" for one in ranked[:3])
        asked = " ".join(word for word in (order.function, order.file and f"in {order.file}") if word)
        raise UsageError(f"no failing test reaches {asked}: they reach {some}")
    return [one for one in left if one.score == left[0].score][:MAX_SUSPECTS]


def _introduce(suspect: Suspect, task: Task, policy: Policy, say: Say) -> None:
    first, last = int(str(task.data["first_line"])), int(str(task.data["last_line"]))
    say(
        f"function  {suspect.qualname} in {suspect.path}, lines {first} to {last}: {len(suspect.failing)} failing and "
        f"{len(suspect.passing)} passing tests reach it"
    )
    say(f"shown     {', '.join(task.shown_checks)}")
    num, trained = last - first + 1, policy.recipe.max_window_lines
    if num > trained:
        say(f"note      the function has {num} lines; this policy was trained on functions of at most {trained}")


def _and_errors(found: Diagnosis) -> str:
    return f"; {len(found.errors)} files could not be collected ({found.errors[0]})" if found.errors else ""


def _attempt(order: Order, task: Task, number: int) -> Attempt:
    return Attempt(
        id=f"agent-{number}",
        group_id="agent",
        task_id=task.id,
        stage="eval",
        seed=order.seed * 1_000_003 + number,
        lease_id=f"agent-{number}",
        lease_until_s=0.0,
        try_index=number,
    )
