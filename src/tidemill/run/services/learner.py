"""The learner's process: pre-training, demonstrations, then batch after batch. No untrusted child."""

import asyncio
import time
from collections.abc import Sequence

import torch

from tidemill.core.blobs import get_record
from tidemill.core.metrics import MetricsLog
from tidemill.core.records import Batch, Episode, Trajectory
from tidemill.core.seams import Coordinator
from tidemill.episodes.demonstrations import taken_back
from tidemill.run.config import Recipe
from tidemill.run.loops import LEASE_WAIT_S, learn, publish
from tidemill.run.pretraining import copying, documents, load_corpus
from tidemill.run.services.context import Context, corpus_file, model_config
from tidemill.run.start import start_weights
from tidemill.trajectories.build import trajectories, without_steps
from tidemill.updates.corpus import Corpus, Document, EpochOrder
from tidemill.updates.learner import Learner, LearnerConfig
from tidemill.updates.schedules import StageConfig

SAVE_EVERY_STEPS = 50
"""Of pre-training and demonstrations."""
SAVE_EVERY_UPDATES = 5
MAX_PACK_TOKENS = 4096
WARMUP_STEPS = 40
"""Of pre-training. Copying is learnt at the full rate only: a warm-up of hundreds of steps would use its share up."""
STEPS_AT_ONCE = 2000
"""Of pre-training, whose documents are held in memory together."""


def learner_config(recipe: Recipe) -> LearnerConfig:
    def stage(peak_lr: float, num_steps: int, warmup_steps: int, **rest: object) -> StageConfig:
        steps = max(num_steps, 1)
        return StageConfig(peak_lr=peak_lr, num_steps=steps, warmup_steps=min(warmup_steps, steps // 5), **rest)  # type: ignore[arg-type]

    cpt, sft, rl = recipe.pretraining, recipe.demonstrations, recipe.rl
    return LearnerConfig(
        cpt=stage(cpt.peak_lr, cpt.num_steps, WARMUP_STEPS, schedule="wsd", weight_decay=0.01, decay_share=0.3),
        sft=stage(sft.peak_lr, sft.num_steps, sft.num_steps // 20, schedule="cosine"),
        rl=stage(rl.peak_lr, rl.num_updates, 0, max_grad_norm=rl.max_grad_norm),
        max_pack_tokens=max(MAX_PACK_TOKENS, recipe.policy.max_context_tokens),
        loss_constant=rl.loss_constant,
        kl_weight=rl.kl_weight,
    )


async def serve(context: Context) -> None:
    recipe = context.recipe
    tokenizer = context.tokenizer()
    source = recipe.seed if recipe.start_from is None else start_weights(context.folder)
    learner = Learner(learner_config(recipe), model_config(recipe.policy, tokenizer.vocab_size), source=source)
    resumed = learner.load(context.folder.checkpoints)
    context.events.write("resume" if resumed else "begin", version=learner.version, numbers={"step": learner.step})
    metrics = MetricsLog(context.folder.metrics)
    metrics.truncate_after(learner.step)
    coordinator = context.coordinator()
    try:
        if learner.stage != "rl":
            await _make_version_0(context, learner, coordinator, metrics)
        torch.set_num_threads(1)
        if recipe.rl.kl_weight > 0:
            learner.hold_reference(context.store.load(0))
        await learn(
            learner,
            coordinator,
            context.store,
            lambda batch: batch_trajectories(context, batch),
            run_id=context.info.run_id,
            tokenizer=tokenizer.files(),
            num_updates=recipe.rl.num_updates,
            save_every=SAVE_EVERY_UPDATES,
            checkpoints=context.folder.checkpoints,
            metrics=metrics,
            events=context.events,
        )
    finally:
        metrics.close()
        await coordinator.close()


def batch_trajectories(context: Context, batch: Batch) -> dict[str, list[Trajectory]]:
    """Attempt → its training sequences, made from the episodes in the blobs."""
    return {item.attempt_id: trajectories(get_record(context.blobs, item.episode, Episode)) for item in batch.items}


def lessons(episode: Episode) -> list[Trajectory]:
    """What a demonstration teaches: all but the edits that it took back."""
    return [
        without_steps(trajectory, segment, taken_back(segment.steps))
        for trajectory, segment in zip(trajectories(episode), episode.segments, strict=True)
    ]


async def _make_version_0(context: Context, learner: Learner, coordinator: Coordinator, metrics: MetricsLog) -> None:
    """Pre-training and demonstrations, from where the checkpoint left them, and the first publication."""
    recipe = context.recipe
    if learner.stage in (None, "cpt") and recipe.pretraining.num_steps:
        with context.events.span("pretrain"):
            await _pretrain(context, learner, metrics)
        learner.save(context.folder.checkpoints)
    if recipe.demonstrations.num_steps:
        start = time.time()
        while (results := await coordinator.demonstrations(LEASE_WAIT_S)) is None:
            pass
        context.events.write("wait", from_s=start, note="demonstrations")
        shown = [
            lesson
            for result in results
            if result.episode is not None
            for lesson in lessons(get_record(context.blobs, result.episode, Episode))
        ]
        with context.events.span("imitate"):
            await _imitate(context, learner, shown, metrics)
    learner.save(context.folder.checkpoints)
    files = context.tokenizer().files()
    publish(learner, context.store, files, version=0, batch=None, run_id=context.info.run_id, events=context.events)


async def _pretrain(context: Context, learner: Learner, metrics: MetricsLog) -> None:
    """Stretch after stretch of documents. The position that is kept is that in the present one."""
    config = context.recipe.pretraining
    torch.set_num_threads(config.num_threads)
    begin = 0
    for end in stretches(config.num_copying_steps, config.num_steps):
        if learner.step < end:
            made = _documents(context, begin, end)
            corpus = Corpus(made, row_tokens=config.tokens_per_step, seed=context.recipe.seed, whole=True)
            if learner.step > begin:
                corpus.seek(learner.position)
            while learner.step < end:
                found = learner.train_text(corpus.next_rows(1))
                learner.position = corpus.position
                _log(metrics, learner, found)
                await asyncio.sleep(0)  # where a request to stop takes effect
                if learner.step % SAVE_EVERY_STEPS == 0:
                    learner.save(context.folder.checkpoints)
        begin = end


def stretches(num_copying: int, num_steps: int) -> list[int]:
    """Last steps of the stretches whose documents are made at once: copying, then code, so many steps each."""
    return sorted({num_copying, *range(num_copying, num_steps, STEPS_AT_ONCE), num_steps} - {0})


def _documents(context: Context, begin: int, end: int) -> list[Document]:
    """For the steps from `begin` to `end`, enough that none comes twice."""
    recipe, config = context.recipe, context.recipe.pretraining
    num_tokens = (end - begin) * config.tokens_per_step
    if end <= config.num_copying_steps:
        return copying(context.tokenizer(), num_tokens=num_tokens, seed=recipe.seed)
    return documents(
        load_corpus(corpus_file(context.folder)),
        context.renderer(),
        code_weight=config.code_weight,
        max_tokens=recipe.policy.max_context_tokens,
        num_tokens=num_tokens,
        seed=recipe.seed,
        stretch=begin,
    )


async def _imitate(context: Context, learner: Learner, shown: Sequence[Trajectory], metrics: MetricsLog) -> None:
    config = context.recipe.demonstrations
    torch.set_num_threads(context.recipe.pretraining.num_threads)
    order = EpochOrder(len(shown), context.recipe.seed)
    done = learner.stage_step if learner.stage == "sft" else 0
    order.take(done * config.episodes_per_step)
    while done < config.num_steps:
        found = learner.train_demonstrations([shown[index] for index in order.take(config.episodes_per_step)])
        done += 1
        _log(metrics, learner, found)
        await asyncio.sleep(0)  # where a request to stop takes effect
        if done % SAVE_EVERY_STEPS == 0:
            learner.save(context.folder.checkpoints)


def _log(metrics: MetricsLog, learner: Learner, found: dict[str, float]) -> None:
    metrics.write({"stage": learner.stage or "", "step": learner.step, "time_s": time.time(), **found})
