"""Who can be examined: a run's policy, a scripted agent, a chat model behind an API. All play by the same rules."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Literal, Protocol, final

import msgspec

from tidemill.core.blobs import get_record
from tidemill.core.errors import UsageError
from tidemill.core.records import Attempt, Episode, Limits, Task, Tree
from tidemill.core.seams import Engine
from tidemill.episodes.chat import run_chat_episode
from tidemill.episodes.chat_client import ChatClient
from tidemill.episodes.demonstrations import Demonstrator, NoOp, swapped_words
from tidemill.episodes.generation import Sampling
from tidemill.episodes.mend import first_window
from tidemill.episodes.scripted import Policy, ScriptedEngine, spoken
from tidemill.episodes.syntax import syntax_error
from tidemill.run.config import Recipe
from tidemill.run.services.rollouts import sampling_of, within_context
from tidemill.run.workshop import Workshop
from tidemill.tasks.inverse import inverses
from tidemill.text.tokenizer import Tokenizer

Agent = Literal["oracle", "noop", "blind", "inverse"]
NO_TOKEN_LIMIT = 1 << 20
"""What a script says costs it nothing: it is held by the number of its turns alone."""


class Player(Protocol):
    version: int
    """Of the policy; −1 where it has none."""

    async def play(self, workshop: Workshop, attempt: Attempt) -> Episode: ...


@final
class PolicyPlayer:
    """A published version of a run, in an engine of our own, limited and sampled as its recipe says."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, recipe: Recipe, *, version: int, temperature: float
    ) -> None:
        self.version = version
        self._engine, self._tokenizer, self._recipe = engine, tokenizer, recipe
        self._sampling = dataclasses.replace(sampling_of(recipe), temperature=temperature)

    async def play(self, workshop: Workshop, attempt: Attempt) -> Episode:
        task = within_context(workshop.tasks.task(attempt.task_id), self._recipe)
        return await workshop.play(
            task,
            attempt,
            lambda renderer: self._engine,
            tokenizer=self._tokenizer,
            sampling=self._sampling,
            engine_name="evaluation",
        )


@final
class ScriptedPlayer:
    """An agent that no model drives, through the real harness: what a figure has to be compared with.

    | agent   | does                                                                                               |
    |---------|----------------------------------------------------------------------------------------------------|
    | oracle  | makes the known repair, tests and submits it: anything but 100 % is a fault of ours                |
    | noop    | submits at once: anything but 0 % is one, too                                                      |
    | blind   | draws valid edits of one token, none twice, tests each and submits the first that passes           |
    | inverse | the same, among the edits alone that undo a fault which the task maker can plant: it knows the game |

    Who guesses draws uniformly, and takes each guess back before the next one: see `benchmarks/chance.py`.
    """

    version = -1

    def __init__(self, agent: Agent, tokenizer: Tokenizer) -> None:
        self._agent, self._tokenizer = agent, tokenizer
        self._guesses: dict[str, list[str]] = {}

    async def play(self, workshop: Workshop, attempt: Attempt) -> Episode:
        task = workshop.tasks.task(attempt.task_id)
        task = _with_limits(task, max_sampled_tokens=NO_TOKEN_LIMIT, max_context_tokens=NO_TOKEN_LIMIT)
        policy = self._policy(workshop, task, attempt)
        return await workshop.play(
            task,
            attempt,
            lambda renderer: ScriptedEngine(spoken(policy, renderer)),
            tokenizer=self._tokenizer,
            sampling=Sampling(),
            engine_name=self._agent,
        )

    def _policy(self, workshop: Workshop, task: Task, attempt: Attempt) -> Policy:
        if self._agent == "noop":
            return NoOp()
        if task.repository is None or task.environment != "mend":
            raise UsageError(f"--agent {self._agent} knows tasks of the family mend, and {task.id} is {task.family}")
        repository = get_record(workshop.tasks.blobs, task.repository, Tree)
        if self._agent == "oracle":
            verifier = workshop.vault.verifier(task.id)
            return Demonstrator(task, repository, verifier, gold_probability=1.0, seed=attempt.seed)
        drawn = self._drawn(task, repository, attempt.seed)

        def draw(source: str, first_line: int, last_line: int, rng: random.Random) -> str | None:
            return next(drawn, None)

        return Demonstrator(task, repository, None, gold_probability=0.0, seed=attempt.seed, wrong_edit=draw)

    def _drawn(self, task: Task, repository: Tree, seed: int) -> Iterator[str]:
        """Valid guesses in a random order, each once."""
        if task.id not in self._guesses:
            path = str(task.data["path"])
            source = next(file.data.decode("utf-8") for file in repository.files if file.path == path)
            first, num_lines = first_window(task)
            window = first, first + num_lines - 1
            self._guesses[task.id] = guesses(self._agent, source, *window)
        order = list(self._guesses[task.id])
        random.Random(f"{seed}/{task.id}/guesses").shuffle(order)
        return (guess for guess in order if syntax_error(guess) is None)


def guesses(agent: Agent, source: str, first_line: int, last_line: int) -> list[str]:
    """What `blind` or `inverse` draws from; some of it may be no valid Python."""
    words = swapped_words(source, first_line, last_line) if agent == "blind" else []
    return list(dict.fromkeys([*inverses(source, first_line, last_line), *words]))


@final
class ChatPlayer:
    """A model behind an OpenAI-compatible API. Its tokens are not ours: their limit is the caller's."""

    version = -1

    def __init__(
        self, client: ChatClient, *, temperature: float, max_sampled_tokens: int, wall_s: float | None = None
    ) -> None:
        """`wall_s`: in place of the task's own limit."""
        self._client, self._temperature = client, temperature
        self._max_sampled_tokens, self._wall_s = max_sampled_tokens, wall_s

    async def play(self, workshop: Workshop, attempt: Attempt) -> Episode:
        task = workshop.tasks.task(attempt.task_id)
        wall_s = task.limits.wall_s if self._wall_s is None else self._wall_s
        task = _with_limits(task, max_sampled_tokens=self._max_sampled_tokens, wall_s=wall_s)
        return await run_chat_episode(
            task,
            attempt=attempt,
            environment=workshop.environment(task),
            client=self._client,
            temperature=self._temperature,
            sandbox_tier=workshop.tier_of(task),
        )


def _with_limits(task: Task, **limits: float) -> Task:
    changed: Limits = msgspec.structs.replace(task.limits, **limits)
    return msgspec.structs.replace(task, limits=changed)
