"""What a test of episodes needs around the harness."""

import asyncio
import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tidemill.core.records import Attempt, Episode, Limits, Outcome, Task, ToolCall
from tidemill.core.seams import Engine, Environment, Feedback, Score, ToolSpec
from tidemill.episodes.conduct import HarnessConfig
from tidemill.episodes.generation import Sampling
from tidemill.episodes.harness import run_episode
from tidemill.text.compact import CompactRenderer
from tidemill.text.tokenizer import Tokenizer

ATTEMPT = Attempt(
    id="attempt-1",
    group_id="group-1",
    task_id="task-1",
    stage="rl",
    seed=7,
    lease_id="lease-1",
    lease_until_s=0.0,
    try_index=0,
)


@cache
def tokenizer() -> Tokenizer:
    texts = [f"{n}|    if value_{n} < low: return high\nsay submit echo edit test {n}" for n in range(30)]
    return Tokenizer.train(texts, 500)


@cache
def renderer() -> CompactRenderer:
    return CompactRenderer(tokenizer())


def say(name: str, **arguments: str | int) -> list[int]:
    return renderer().say([ToolCall(id="", name=name, arguments=arguments)])


def recipe(name: str) -> Any:
    """A module of `recipes/`."""
    path = Path(__file__).parents[2] / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Echo:
    """Says back what it is told; `submit` ends. `broken`: stage → what is raised there."""

    tools: Sequence[ToolSpec] = (
        ToolSpec(name="echo", description="", parameters={"text": "string"}, required=("text",)),
        ToolSpec(name="submit", description="", parameters={}, required=()),
    )
    reward_version = "echo-1"

    def __init__(self, broken: dict[str, Exception] | None = None, slow_s: float = 0.0) -> None:
        self.broken = broken or {}
        self.slow_s = slow_s
        self.heard: list[str] = []
        self.outcome: Outcome | None = None
        self.num_closed = 0

    def _maybe_break(self, stage: str) -> None:
        if stage in self.broken:
            raise self.broken[stage]

    async def open(self, task: Task) -> str:
        self._maybe_break("open")
        return task.statement

    async def call(self, call: ToolCall) -> Feedback:
        self._maybe_break("call")
        await asyncio.sleep(self.slow_s)
        if call.name == "submit":
            return Feedback(text="", ends="submitted")
        self.heard.append(str(call.arguments["text"]))
        return Feedback(text=f"said {call.arguments['text']}")

    async def score(self, outcome: Outcome) -> Score:
        self.outcome = outcome
        self._maybe_break("score")
        return Score(rewards={"heard": float(len(self.heard))}, measures={"solved": 1.0})

    async def close(self) -> None:
        self.num_closed += 1
        self._maybe_break("close")


def echo_task(
    *, max_steps: int = 10, max_sampled_tokens: int = 200, max_context_tokens: int = 500, wall_s: float = 30.0
) -> Task:
    return Task(
        id="task-1",
        family="echo",
        environment="echo",
        split="train",
        statement="say something, then submit",
        repository=None,
        layer=None,
        limits=Limits(
            max_steps=max_steps,
            max_sampled_tokens=max_sampled_tokens,
            max_context_tokens=max_context_tokens,
            max_observation_tokens=20,
            wall_s=wall_s,
        ),
        shown_checks=(),
        data={},
        provenance={},
    )


def play(
    engine: Engine,
    environment: Environment,
    task: Task,
    *,
    sampling: Sampling | None = None,
    config: HarnessConfig | None = None,
    attempt: Attempt = ATTEMPT,
    clock: Callable[[], float] = time.monotonic,
) -> Episode:
    """One episode, from start to end."""
    return asyncio.run(
        run_episode(
            task,
            attempt=attempt,
            environment=environment,
            renderer=renderer(),
            engine=engine,
            sampling=sampling or Sampling(),
            config=config,
            clock=clock,
        )
    )
