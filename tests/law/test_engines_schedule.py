"""Whatever comes when (requests, turns, aborts, new weights), each logprob is the one that its rows account for."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.seams import Chunk, GenerationRequest
from tidemill.engines.batcher import Batcher, EngineConfig, Job, SwapMode
from tidemill.models.config import ModelConfig
from tidemill.models.transformer import KVCache, init_model

CONFIG = ModelConfig(
    vocab_size=30,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=4,
    experts_per_token=2,
    expert_size=8,
    max_positions=160,
)
MODELS = [init_model(CONFIG, seed, std=0.3).requires_grad_(False) for seed in range(8)]
OPENING = [int(i) for i in np.random.default_rng(0).integers(0, 30, 20)]

operations = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 4), st.integers(1, 12), st.integers(1, 9)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("swap")),
    st.tuples(st.just("abort"), st.integers(0, 4)),
)


class World:
    """A batcher and the five sessions that use it, each with one request at a time."""

    def __init__(self, mode: SwapMode) -> None:
        config = EngineConfig(num_slots=3, context_tokens=160, prefill_tokens=7, flush_tokens=2, swap_mode=mode)
        self.batcher = Batcher(MODELS[0], 0, config)
        self.ids = [list(OPENING) for _ in range(5)]
        self.jobs: dict[int, Job] = {}
        self.chunks: dict[int, list[Chunk]] = {}
        self.rows: list[tuple[list[int], list[Any]]] = [([], []) for _ in range(5)]
        self.num_checked = 0
        self.rng = np.random.default_rng(1)

    def ask(self, session: int, num_new: int, max_tokens: int) -> None:
        prompt = self.ids[session] + self.rng.integers(0, 30, num_new).tolist()
        if session in self.jobs or len(prompt) + max_tokens > 160:
            return
        job = Job(
            GenerationRequest(
                session=str(session), prompt_ids=prompt, max_tokens=max_tokens, stop_ids=[0], seed=session
            )
        )
        self.batcher.check(job.request)
        self.batcher.submit(job)
        self.jobs[session], self.chunks[session] = job, []

    def step(self, num: int) -> None:
        for _ in range(num):
            for job, chunk in self.batcher.step():
                assert isinstance(chunk, Chunk)
                session = int(job.request.session)
                assert self.jobs[session] is job
                self.chunks[session].append(chunk)
                if chunk.stop_reason is not None:
                    del self.jobs[session]
                    self._check(session, job.request.prompt_ids)

    def swap(self) -> None:
        if self.batcher.version + 1 < len(MODELS):
            version = self.batcher.version + 1
            self.batcher.swap(MODELS[version], version)

    def abort(self, session: int) -> None:
        if session in self.jobs:
            self.batcher.abort(self.jobs.pop(session))

    def _check(self, session: int, prompt: list[int]) -> None:
        """Feed every position by the model that its row names, and look at what that model then says."""
        chunks = self.chunks[session]
        sampled = [i for c in chunks for i in c.token_ids]
        logprobs = [x for c in chunks for x in c.logprobs]
        versions = [v for c in chunks for v in c.versions]
        last = chunks[-1]
        assert last.kv_versions is not None and last.routes is not None
        kv_versions, routes = self.rows[session]
        assert last.row_start <= len(kv_versions)
        kv_versions = kv_versions[: last.row_start] + last.kv_versions.numpy().tolist()
        routes = routes[: last.row_start] + list(last.routes.numpy())
        self.rows[session] = (kv_versions, routes)
        ids = prompt + sampled
        self.ids[session] = ids
        assert len(kv_versions) == len(routes) == len(ids) - 1
        assert kv_versions[len(prompt) - 1 :] == versions and versions == sorted(versions)
        cache = KVCache(CONFIG, 1, 160)
        for position, (token, version) in enumerate(zip(ids[:-1], kv_versions, strict=True)):
            hidden, found = MODELS[version].forward_cached(
                torch.tensor([token]), torch.tensor([position]), cache, 1, []
            )
            assert found[0].tolist() == routes[position].tolist()
            if position >= len(prompt) - 1:
                expected = MODELS[version].logits(hidden)[0].log_softmax(-1)[ids[position + 1]]
                assert abs(float(expected) - logprobs[position - len(prompt) + 1]) < 1e-5
        self.num_checked += 1


@settings(max_examples=25, deadline=None)
@given(st.lists(operations, min_size=4, max_size=40))
def test_every_logprob_is_what_its_rows_account_for(ops: list[tuple[Any, ...]]) -> None:
    world = World("continue")
    with torch.inference_mode():
        for what, *arguments in ops:
            getattr(world, what)(*arguments)
        while world.batcher.has_work:
            world.step(1)
    assert not world.jobs and not world.batcher.running and not world.batcher.waiting


def test_the_law_is_not_vacuous() -> None:
    """A long mixed schedule finishes generations over several versions, with shared and evicted sessions."""
    world = World("continue")
    rng = np.random.default_rng(3)
    with torch.inference_mode():
        for _ in range(60):
            world.ask(int(rng.integers(5)), 3, 6)
            world.step(2)
            if rng.random() < 0.12:
                world.swap()
        while world.batcher.has_work:
            world.step(1)
    assert world.num_checked > 20
    assert any(len(set(kv_versions)) > 2 for kv_versions, _ in world.rows)
