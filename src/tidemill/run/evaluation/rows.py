"""Attempts of an evaluation, and the rows that they leave: shared by the evaluator of a run and by `tidemill eval`."""

from collections.abc import Awaitable, Callable

from tidemill.core.records import Attempt, Episode, Task
from tidemill.episodes.mend import PASSED
from tidemill.episodes.results import attempt_result
from tidemill.reports.behaviour import behaviours
from tidemill.reports.evaluation import EvalRow

MAX_TRIES = 3
"""Of an attempt that the machine, not the agent, spoils."""


def attempt_of(version: int, task_id: str, sample: int, *, seed: int, try_index: int = 0) -> Attempt:
    """The same arguments give the same attempt, whoever plays it."""
    name = f"eval-{version}-{task_id}-{sample}"
    return Attempt(
        id=name,
        group_id=f"eval-{version}-{task_id}",
        task_id=task_id,
        stage="eval",
        seed=seed * 1_000_003 + sample,
        lease_id=f"{name}-{try_index}",
        lease_until_s=0.0,
        try_index=try_index,
    )


async def played(
    play: Callable[[Attempt], Awaitable[Episode]], version: int, task_id: str, sample: int, *, seed: int
) -> tuple[Attempt, Episode]:
    """Up to `MAX_TRIES` times, while it ends as an `env_fault`; the last one may be one."""
    for number in range(MAX_TRIES):
        attempt = attempt_of(version, task_id, sample, seed=seed, try_index=number)
        episode = await play(attempt)
        if episode.outcome != "env_fault":
            break
    return attempt, episode


def row_of(task: Task, attempt: Attempt, episode: Episode, blob: str, *, version: int, sample: int) -> EvalRow:
    """`blob`: under which the episode is kept. Tokens are those that were sampled, or that an endpoint counted."""
    result = attempt_result(episode, blob, attempt)
    completion = int(episode.measures.get("completion_tokens", result.sampled_tokens))
    prompts = int(episode.measures.get("prompt_tokens", result.total_tokens - result.sampled_tokens))
    return EvalRow(
        version=version,
        task_id=task.id,
        sample=sample,
        reward=episode.reward,
        solved=episode.measures.get("solved", 0.0) == 1.0,
        sampled_tokens=completion,
        total_tokens=completion + prompts,
        turns=sum(len(segment.steps) for segment in episode.segments),
        outcome=episode.outcome,
        episode=blob,
        family=task.family,
        package=task.provenance.get("package", ""),
        measures={**episode.measures, **behaviours(episode, passed=PASSED)},
    )
