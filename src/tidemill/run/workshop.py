"""Where episodes are played: a task set, its hidden verifiers, sandboxes, and the environments."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import final

from tidemill.core.errors import SandboxUnavailable, UsageError
from tidemill.core.records import Attempt, Episode, Task
from tidemill.core.seams import Engine, Environment, Renderer, SandboxTier
from tidemill.episodes.conduct import harness_hash
from tidemill.episodes.generation import Sampling
from tidemill.episodes.grading import Grader
from tidemill.episodes.harness import run_episode
from tidemill.episodes.mend import MendEnvironment
from tidemill.sandboxes.selftest import run as selftest
from tidemill.tasks.folder import TaskSet
from tidemill.tasks.vault import FolderVault
from tidemill.text.compact import CompactRenderer
from tidemill.text.tokenizer import Tokenizer


@final
@dataclass(frozen=True, kw_only=True)
class Workshop:
    tasks: TaskSet
    vault: FolderVault
    tier: SandboxTier
    environments: Mapping[str, Callable[[], Environment]]

    def environment(self, task: Task) -> Environment:
        """A fresh one, for one attempt. Raises `UsageError` where the task wants one that nobody has named."""
        if task.environment not in self.environments:
            raise UsageError(f"task {task.id} wants environment {task.environment!r}: name it in the recipe")
        return self.environments[task.environment]()

    def rules(self, tasks: Iterable[Task], renderer: str) -> dict[str, str]:
        """The harness hash and the reward version of episodes at these tasks; of several environments, all of them."""
        one_of = {task.environment: task for task in tasks}
        environments = [self.environment(one_of[name]) for name in sorted(one_of)]
        return {
            "harness_hash": " ".join(harness_hash(each.tools, renderer) for each in environments),
            "reward_version": " ".join(each.reward_version for each in environments),
        }

    async def try_sandbox(self) -> None:
        """Before the first episode. Raises `SandboxUnavailable` where the sandbox does not hold."""
        if self.tier.tier == "local":
            return
        probes = await selftest(self.tier, next(iter(self.tasks.layers.values()), None))
        failed = [probe for probe in probes if not probe.held]
        if failed:
            raise SandboxUnavailable(
                f"the sandbox does not hold: {failed[0].name}: {failed[0].detail} (tidemill doctor --sandbox)"
            )

    def tier_of(self, task: Task) -> str:
        return self.tier.tier if task.layer is not None else "none"

    async def play(
        self,
        task: Task,
        attempt: Attempt,
        engine_of: Callable[[Renderer], Engine],
        *,
        tokenizer: Tokenizer,
        sampling: Sampling,
        engine_name: str,
    ) -> Episode:
        """One episode in the harness, in the words of `tokenizer`: in training, in evaluation and by a script alike."""
        renderer = CompactRenderer(tokenizer)
        return await run_episode(
            task,
            attempt=attempt,
            environment=self.environment(task),
            renderer=renderer,
            engine=engine_of(renderer),
            sampling=sampling,
            engine_name=engine_name,
            sandbox_tier=self.tier_of(task),
        )


def workshop_over(
    tasks: TaskSet,
    tier: SandboxTier,
    environments: Mapping[str, Callable[[], Environment]],
    *,
    keeps_verdicts: bool,
) -> Workshop:
    """`environments` stand beside the built-in `mend`.

    keeps_verdicts: the same patch of the same task is judged once, and the same edit is tested once.
    """
    vault = FolderVault(tasks.folder / "vault")
    grader = Grader(tier, vault, tasks.blobs, tasks.layers, num_kept=4096 if keeps_verdicts else 0)
    failures: dict[str, str] | None = {} if keeps_verdicts else None

    def mend() -> Environment:
        return MendEnvironment(tier, blobs=tasks.blobs, layers=tasks.layers, grader=grader, failures=failures)

    return Workshop(tasks=tasks, vault=vault, tier=tier, environments={"mend": mend, **environments})
