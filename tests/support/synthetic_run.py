"""A small run folder that is true to every schema, without a learner: for tests of reports and audit.

The journal is written by its real writer, versions by the real store, ids by the real tokenizer and renderer. Logprobs
are those of the published weights under the recorded routes, so that a fresh forward pass finds nothing amiss.
"""

import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from support.synthetic_policy import random_weights
from support.synthetic_texts import Script, scripts
from tidemill.batches.admission import AdmissionConfig, compose
from tidemill.batches.advantages import shuffled_rewards, task_advantages
from tidemill.batches.journal import JournalWriter
from tidemill.batches.schema import Identity
from tidemill.core.blobs import FolderBlobs, put_record
from tidemill.core.events import EventLog
from tidemill.core.metrics import MetricsLog
from tidemill.core.records import (
    Array,
    Attempt,
    AttemptResult,
    Batch,
    BatchItem,
    Episode,
    Generation,
    Segment,
    Step,
    digest,
)
from tidemill.deltas.layout import weights_files
from tidemill.deltas.store import FolderStore
from tidemill.reports.audit.forward import float64_tensors, forward, logprob
from tidemill.reports.evaluation import EvalRow
from tidemill.text.compact import CompactRenderer
from tidemill.text.tokenizer import Tokenizer

STEP_S = 12.0
"""Of the run's own clock, per update."""


@dataclass(kw_only=True)
class _World:
    folder: Path
    seed: int
    identity: Identity
    tokenizer: Tokenizer
    now_s: float
    rng: random.Random
    journal: JournalWriter
    blobs: FolderBlobs
    store: FolderStore
    logs: dict[str, EventLog]
    skill: float = 0.0
    """How often an attempt is solved."""
    policies: dict[int, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)
    scripts: list[Script] = field(default_factory=list)

    def policy(self, version: int) -> tuple[dict[str, Any], dict[str, Any]]:
        if version not in self.policies:
            weights = self.store.load(version)
            self.policies[version] = (weights.config, float64_tensors(weights_files(weights)["model.safetensors"]))
        return self.policies[version]


def synthetic_run(
    folder: Path, *, num_updates: int = 3, group_size: int = 2, seed: int = 0, shuffled: bool = False
) -> Path:
    """Build a finished run: demonstrations, `num_updates` updates with age up to 1, a rejected group, two evaluations.
    Returns `folder`."""
    world = _open(folder, num_updates, group_size, seed, shuffled)
    leases = world.journal.lease("worker-0", "i", 2, stage="sft", version=-1, request="sft", now_s=world.now_s)
    for lease in leases:
        _finish(world, lease, -1, -1)
    _publish(world, 0, None)
    _evaluate(world, 0, 3)
    start_s, held = world.now_s, []
    metrics = MetricsLog(folder / "metrics.jsonl")
    for version in range(num_updates):
        world.skill = 0.25 + 0.6 * version / max(num_updates - 1, 1)
        held = _rollouts(world, version, held)
        _update(world, version, metrics)
    _evaluate(world, num_updates, 3)
    _samples(world, start_s)
    world.logs["supervisor-0"].write("stopping", from_s=world.now_s, to_s=world.now_s, note="done")
    for log in world.logs.values():
        log.write("stop", from_s=world.now_s, to_s=world.now_s)
        log.close()
    metrics.close()
    world.journal.close()
    return folder


def _open(folder: Path, num_updates: int, group_size: int, seed: int, shuffled: bool) -> _World:
    folder.mkdir(parents=True)
    everything = scripts()
    tokenizer = Tokenizer.train([script.statement for script in everything] * 3, 512)
    identity = Identity(
        run_id=f"synthetic-{seed}",
        recipe="r" * 64,
        seed=seed,
        sft_tasks=("mend/demo-0",),
        rl_tasks=tuple(f"mend/task-{index}" for index in range(4 * num_updates + 8)),
        config=AdmissionConfig(
            group_size=group_size,
            groups_per_batch=2,
            max_age=1,
            num_updates=num_updates,
            num_demonstrations_per_task=2,
            max_tries=1,
            shuffled_rewards=shuffled,
        ),
    )
    whos = ("coordinator-0", "worker-0", "engine-0", "learner-0", "evaluator-0", "supervisor-0")
    world = _World(
        folder=folder,
        seed=seed,
        identity=identity,
        tokenizer=tokenizer,
        now_s=1_790_000_000.0,
        rng=random.Random(seed),
        journal=JournalWriter(folder / "journal.sqlite", identity),
        blobs=FolderBlobs(folder / "blobs"),
        store=FolderStore(folder / "store"),
        logs={who: EventLog(folder / "events", who) for who in whos},
        scripts=everything,
    )
    for log in world.logs.values():
        log.write("start", from_s=world.now_s, to_s=world.now_s)
    (folder / "run.json").write_text(json.dumps({"run_id": identity.run_id, "recipe": {"name": "synthetic"}}))
    (folder / "lock").touch()
    return world


# --- versions ------------------------------------------------------------------------------------------------


def _publish(world: _World, version: int, batch: str | None) -> None:
    weights = random_weights(world.tokenizer, seed=world.seed, version=version)
    snapshot = world.store.publish(
        weights, version=version, batch=batch, step=20 + version, run_id=world.identity.run_id
    )
    os.utime(world.folder / "store" / "versions" / f"{version:08d}.json", (world.now_s, world.now_s))
    numbers = {"bytes": float(snapshot.num_bytes)}
    world.logs["learner-0"].write(
        "publish", from_s=world.now_s - 0.2, to_s=world.now_s, version=version, numbers=numbers
    )
    world.logs["engine-0"].write("swap", from_s=world.now_s + 0.1, to_s=world.now_s + 0.15, version=version)


# --- episodes ------------------------------------------------------------------------------------------------


def _generations(world: _World, script: Script, first: int, last: int) -> tuple[list[Generation], list[str], list[int]]:
    """The script's turns as one segment. Where `last` is newer than `first`, the last turn changes over half-way."""
    renderer = CompactRenderer(world.tokenizer)
    prompt = renderer.open([], script.statement)
    generations: list[Generation] = []
    texts, ids, versions, starts = [], [], [], []
    for number, turn in enumerate(script.turns):
        said = renderer.say([turn.call])
        starts.append((len(ids), len(prompt), len(said)))
        middle = len(said) // 2 if number == len(script.turns) - 1 and last > first else len(said)
        ids += prompt + said
        versions += [first] * (len(prompt) + middle) + [last] * (len(said) - middle)
        texts.append(world.tokenizer.decode(said))
        prompt = renderer.observe([turn.observation], 64)
    routes = np.array([world.rng.sample(range(4), 2) for _ in range(len(ids) * 2)], np.uint16).reshape(len(ids), 2, 2)
    logprobs = np.zeros(len(ids))
    if first >= 0:
        logits, _ = forward(*world.policy(first), np.array(ids[:-1]), routes[:-1])
        logprobs[1:] = [logprob(row, token, 1.0) for row, token in zip(logits, ids[1:], strict=True)]
    fed = 0
    for start, num_prompt, num_said in starts:
        a, b = start + num_prompt, start + num_prompt + num_said
        generations.append(
            Generation(
                position=start,
                prompt_ids=Array.of(ids[start:a], "int32"),
                token_ids=Array.of(ids[a:b], "int32"),
                logprobs=Array.of(logprobs[a:b], "float32"),
                versions=Array.of(versions[a:b], "int32"),
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                support_ids=None,
                support_offsets=None,
                row_start=fed,
                kv_versions=Array.of(versions[fed : b - 1], "int32"),
                routes=Array.of(routes[fed : b - 1], "uint16") if first >= 0 else None,
                stop_reason="stop",
                engine="engine-0",
            )
        )
        fed = b - 1
    return generations, texts, prompt


def _episode(world: _World, attempt: Attempt, first: int, last: int) -> Episode:
    solved = world.rng.random() < world.skill or attempt.stage == "sft"
    fitting = [script for script in world.scripts if script.solved == solved]
    script = fitting[world.rng.randrange(len(fitting))]
    generations, texts, closing = _generations(world, script, first, last)
    steps = tuple(
        Step(generation=generation, text=text, calls=(turn.call,), observations=(turn.observation,))
        for generation, text, turn in zip(generations, texts, script.turns, strict=True)
    )
    rewards = {"solved": float(solved), "malformed": 0.0}
    return Episode(
        attempt_id=attempt.id,
        group_id=attempt.group_id,
        task_id=attempt.task_id,
        stage=attempt.stage,
        seed=attempt.seed,
        segments=(Segment(steps=steps, opened_by="start", closing_ids=Array.of(closing, "int32")),),
        outcome="submitted" if solved else "step_limit",
        reward=sum(rewards.values()),
        rewards=rewards,
        measures={"solved": float(solved), "ast_equal": float(solved)},
        verdict={"test_it.py::test_a": "passed" if solved else "failed"},
        patch=script.patch,
        events=(),
        timings_s={"sandbox_open": 0.2, "generate": 1.4, "tools": 0.5, "grade": 0.4},
        cpu_s={"sandbox_open": 0.08, "tools": 0.21, "grade": 0.16},
        harness_hash="h" * 64,
        reward_version="mend-1",
        sandbox_tier="namespaces",
    )


def _finish(world: _World, attempt: Attempt, first: int, last: int) -> None:
    episode = _episode(world, attempt, first, last)
    name = put_record(world.blobs, episode)
    generations = [step.generation for segment in episode.segments for step in segment.steps]
    world.now_s += 0.4
    result = AttemptResult(
        attempt_id=attempt.id,
        lease_id=attempt.lease_id,
        episode=name,
        outcome=episode.outcome,
        reward=episode.reward,
        oldest_version=min(int(g.versions.numpy().min()) for g in generations),
        newest_version=max(int(g.versions.numpy().max()) for g in generations),
        sampled_tokens=sum(g.token_ids.shape[0] for g in generations),
        total_tokens=sum(g.token_ids.shape[0] + g.prompt_ids.shape[0] for g in generations)
        + episode.segments[0].closing_ids.shape[0],
    )
    assert world.journal.complete(result, now_s=world.now_s)
    world.logs["worker-0"].write(
        "episode",
        from_s=world.now_s - 2.5,
        to_s=world.now_s,
        version=last,
        ids={"attempt": attempt.id, "group": attempt.group_id, "task": attempt.task_id},
        numbers={"reward": episode.reward},
    )


def _rollouts(world: _World, version: int, held: list[Attempt]) -> list[Attempt]:
    """Finish what was held, then all that may be leased but the last group, which changes version half-way."""
    for attempt in held:
        _finish(world, attempt, version - 1, version)
    wait_s = world.now_s
    leases = world.journal.lease(
        "worker-0", "i", 64, stage="rl", version=version, request=f"v{version}", now_s=world.now_s
    )
    world.now_s += 0.3
    world.logs["worker-0"].write(
        "wait", from_s=wait_s, to_s=world.now_s, numbers={"free": 8.0, "slots": 8.0}, note="lease"
    )
    groups = list(dict.fromkeys(lease.group_id for lease in leases))
    if version == 1:  # the first one of these fails for good, and is replaced
        broken = next(lease for lease in leases if lease.group_id == groups[0])
        result = AttemptResult(
            attempt_id=broken.id,
            lease_id=broken.lease_id,
            episode=None,
            outcome="env_fault",
            reward=0.0,
            oldest_version=-1,
            newest_version=-1,
            sampled_tokens=0,
            total_tokens=0,
            reason="the sandbox died",
        )
        others = [lease for lease in leases if lease.group_id == groups[0] and lease.id != broken.id]
        _finish(world, others[0], version, version)
        assert world.journal.complete(result, now_s=world.now_s)
        leases = [lease for lease in leases if lease.group_id != groups[0]]
        leases += world.journal.lease(
            "worker-0", "i", 64, stage="rl", version=version, request=f"again{version}", now_s=world.now_s
        )
        groups = list(dict.fromkeys(lease.group_id for lease in leases))
    late = groups[-1] if groups else None
    for lease in leases:
        if lease.group_id != late:
            _finish(world, lease, version, version)
    return [lease for lease in leases if lease.group_id == late]


def _update(world: _World, version: int, metrics: MetricsLog) -> None:
    composition = compose(version, world.journal.candidates(), world.identity.config)
    assert composition.chosen is not None, composition
    results = [(group, result) for group in composition.chosen for result in world.journal.group_results(group)]
    rewards = [result.reward for _, result in results]
    if world.identity.config.shuffled_rewards:
        rewards = shuffled_rewards(rewards, seed=world.seed, index=version)
    advantages, _ = task_advantages(rewards, [group for group, _ in results])
    batch = Batch(
        index=version,
        stage="rl",
        group_size=world.identity.config.group_size,
        items=tuple(
            BatchItem(
                attempt_id=result.attempt_id,
                group_id=group,
                task_id=world.journal.group_task(group),
                episode=result.episode or "",
                reward=result.reward,
                advantage=advantage,
                oldest_version=result.oldest_version,
            )
            for (group, result), advantage in zip(results, advantages, strict=True)
        ),
    )
    name = put_record(world.blobs, batch)
    wait_s = world.now_s
    world.now_s += 1.0
    world.journal.assign(version, digest=digest(batch), blob=name, groups=composition.chosen, now_s=world.now_s)
    world.logs["learner-0"].write("wait", from_s=wait_s, to_s=world.now_s, version=version, note="batch")
    update_s = world.now_s
    world.now_s += STEP_S
    numbers = {
        "loss": 0.1 - 0.01 * version,
        "entropy": 1.2 - 0.05 * version + 0.1 * world.rng.random(),
        "k3": 1e-4 * (1 + world.rng.random()),
        "grad_norm": 0.4 + 0.1 * world.rng.random(),
        "num_loss_tokens": float(sum(r.sampled_tokens for _, r in results)),
        "reward_mean": sum(r.reward for _, r in results) / len(results),
        "age_p50": 0.0,
        "age_max": float(max(version - r.oldest_version for _, r in results)),
    }
    world.logs["learner-0"].write(
        "update", from_s=update_s, to_s=world.now_s, version=version, ids={"batch": digest(batch)}, numbers=numbers
    )
    _publish(world, version + 1, digest(batch))
    metrics.write({"stage": "rl", "step": 21 + version, "version": version + 1, "time_s": world.now_s, **numbers})


def _evaluate(world: _World, version: int, num_tasks: int) -> None:
    start_s = world.now_s
    rows = []
    world.skill = 0.4 if version == 0 else 0.9
    for index in range(num_tasks):
        task_id = f"mend/held-{index}"
        attempt = Attempt(
            id=f"eval-{version}-{index}",
            group_id=f"eval-{version}-{index}",
            task_id=task_id,
            stage="eval",
            seed=index,
            lease_id="",
            lease_until_s=0.0,
            try_index=0,
        )
        episode = _episode(world, attempt, version, version)
        generations = [step.generation for step in episode.segments[0].steps]
        world.now_s += 0.2
        rows.append(
            EvalRow(
                version=version,
                task_id=task_id,
                sample=0,
                reward=episode.reward,
                solved=bool(episode.measures["solved"]),
                sampled_tokens=sum(g.token_ids.shape[0] for g in generations),
                total_tokens=sum(g.token_ids.shape[0] + g.prompt_ids.shape[0] for g in generations),
                turns=len(generations),
                outcome=episode.outcome,
                episode=put_record(world.blobs, episode),
                family="mend",
                package="toolz" if index % 2 else "boltons",
            )
        )
    with (world.folder / "eval.jsonl").open("ab") as file:
        file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    world.logs["evaluator-0"].write("evaluate", from_s=start_s, to_s=world.now_s, version=version)


def _samples(world: _World, start_s: float) -> None:
    """A line of `proc.jsonl` per second and service, from before RL to its end."""
    rates = {"coordinator-0": 0.03, "worker-0": 0.5, "engine-0": 0.6, "learner-0": 0.7, "evaluator-0": 0.1}
    lines = []
    for second in range(-5, int(world.now_s - start_s) + 1):
        for who, rate in rates.items():
            at_s = start_s + second
            sample = {"at_s": at_s, "who": who, "pid": 1, "ticks": round(100 * rate * (second + 5)), "ticks_per_s": 100}
            lines.append({**sample, "rss_bytes": 2 << 20, "num_processes": 1})
    (world.folder / "proc.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
