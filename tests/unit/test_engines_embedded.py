"""The embedded engine computes what the learner computes, keeps sessions apart, and moves to new weights in flight."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from tidemill.core.errors import EngineError, EngineUnavailable, ModelError, RequestRefused
from tidemill.core.grammar import Grammar
from tidemill.core.records import Array
from tidemill.core.seams import Chunk, GenerationRequest, Weights
from tidemill.engines.batcher import Batcher, Delivery, EngineConfig, Job, SwapMode
from tidemill.engines.embedded import EmbeddedEngine
from tidemill.models.config import ModelConfig
from tidemill.models.hf import model_of, weights_of
from tidemill.models.transformer import Transformer, init_model

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=4,
    experts_per_token=2,
    expert_size=24,
    max_positions=256,
)
DEADLINE_S = 20.0


def weights(seed: int) -> Weights:
    return weights_of(init_model(CONFIG, seed, std=0.25), {})


WEIGHTS = {seed: weights(seed) for seed in range(3)}
MODELS = {seed: model_of(WEIGHTS[seed]) for seed in range(3)}


def request(session: str, prompt: list[int], max_tokens: int = 8, **more: Any) -> GenerationRequest:
    return GenerationRequest(session=session, prompt_ids=prompt, max_tokens=max_tokens, **{"stop_ids": []} | more)


class Result:
    """All chunks of a stream, put together."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self.ids = [i for c in chunks for i in c.token_ids]
        self.logprobs = [x for c in chunks for x in c.logprobs]
        self.versions = [v for c in chunks for v in c.versions]
        self.supports = [s for c in chunks for s in c.supports or []]
        last = chunks[-1]
        self.stop_reason, self.row_start = last.stop_reason, last.row_start
        assert last.kv_versions is not None and last.routes is not None
        self.kv_versions = last.kv_versions.numpy().tolist()
        self.routes = last.routes.numpy()


async def collect(engine: EmbeddedEngine, wanted: GenerationRequest) -> Result:
    return Result([chunk async for chunk in engine.generate(wanted)])


def run(test: Callable[[EmbeddedEngine], Awaitable[None]], **config: Any) -> None:
    async def main() -> None:
        engine = EmbeddedEngine(EngineConfig(**{"num_slots": 4, "context_tokens": 200} | config))
        try:
            assert await asyncio.to_thread(engine.swap, 0, WEIGHTS[0])
            await asyncio.wait_for(test(engine), DEADLINE_S)
        finally:
            await engine.close()

    asyncio.run(main())


def batch(batcher: Batcher, *wanted: GenerationRequest) -> list[Result]:
    """Run requests to their end, in this thread."""
    jobs = [Job(one) for one in wanted]
    chunks: dict[int, list[Chunk]] = {id(job): [] for job in jobs}
    for job in jobs:
        batcher.check(job.request)
        batcher.submit(job)
    with torch.inference_mode():
        while batcher.has_work:
            for job, chunk in batcher.step():
                assert isinstance(chunk, Chunk)
                chunks[id(job)].append(chunk)
    return [Result(chunks[id(job)]) for job in jobs]


def batcher(seed: int = 0, **config: Any) -> Batcher:
    return Batcher(MODELS[seed], 0, EngineConfig(**{"num_slots": 4, "context_tokens": 200} | config))


def learner_logprobs(
    model: Transformer, ids: list[int], temperature: float, routes: np.ndarray[Any, Any]
) -> list[float]:
    """Of ids[1:], by the packed forward pass, with the engine's routes forced; the last position's was never fed."""
    rows = np.full((len(ids), CONFIG.num_layers, CONFIG.experts_per_token), 0xFFFF, np.uint16)
    rows[: len(routes)] = routes
    with torch.inference_mode():
        out = model.forward_packed(
            torch.tensor(ids), torch.arange(len(ids)), [0, len(ids)], torch.from_numpy(rows.astype(np.int32)), 0.9
        )
        found, _ = model.token_logprobs(out.hidden_TD[:-1], torch.tensor(ids[1:]), temperature)
    assert out.num_replaced == 0, "the engine's routes are the learner's own"
    return found.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.6])
def test_logprobs_are_the_learners_over_turns_with_routes_replayed(temperature: float) -> None:
    rng = np.random.default_rng(0)
    engine = batcher(prefill_tokens=7)
    ids: dict[str, list[int]] = {s: rng.integers(0, 40, 5 + 9 * i).tolist() for i, s in enumerate("abc")}
    sampled: dict[str, list[tuple[int, float]]] = {s: [] for s in ids}
    routes: dict[str, list[Any]] = {s: [] for s in ids}
    for turn in range(3):
        wanted = [request(s, ids[s], 6 + turn, temperature=temperature, seed=i) for i, s in enumerate(ids)]
        for session, result in zip(ids, batch(engine, *wanted), strict=True):
            assert result.row_start == len(routes[session])
            routes[session] += list(result.routes)
            sampled[session] += [(len(ids[session]) + t, lp) for t, lp in enumerate(result.logprobs)]
            ids[session] += result.ids
            assert len(routes[session]) == len(ids[session]) - 1
            ids[session] += rng.integers(0, 40, 11).tolist()
    for session, sequence in ids.items():
        end = sampled[session][-1][0] + 1
        expected = learner_logprobs(MODELS[0], sequence[:end], temperature, np.stack(routes[session]))
        for position, logprob in sampled[session]:
            assert abs(expected[position - 1] - logprob) < 1e-5


def test_a_session_computes_only_what_is_new() -> None:
    engine = batcher()
    prompt = list(range(20))
    first = batch(engine, request("a", prompt, 5))[0]
    assert engine.prefill_tokens == 20
    more = prompt + first.ids + [1, 2, 3]
    second = batch(engine, request("a", more, 5))[0]
    # The last sampled token was never fed: it is computed with the three observed ones.
    assert engine.prefill_tokens == 20 + 4
    assert second.row_start == len(prompt) + 4
    assert len(second.kv_versions) == len(more) + 4 - second.row_start
    fresh = batch(batcher(), request("b", more, 5))[0]
    assert fresh.ids == second.ids
    np.testing.assert_allclose(fresh.logprobs, second.logprobs, atol=1e-5)


def test_attempts_of_a_group_share_the_prompt() -> None:
    engine = batcher()
    prompt = list(range(30))
    alone = batch(engine, request("a", prompt, 3, seed=1))[0]
    shared = batch(engine, request("b", prompt, 3, seed=1), request("c", [*prompt[:25], 3], 3))
    # Only the last position of the second prompt, and of the third, which differs there, is computed.
    assert engine.prefill_tokens == 32
    assert shared[0].ids == alone.ids and shared[0].row_start == 0 and len(shared[0].kv_versions) == 32
    assert np.array_equal(shared[0].routes[:30], alone.routes[:30])


def test_keys_of_an_older_version_are_not_shared_with_another_session() -> None:
    engine = batcher()
    prompt = list(range(30))
    batch(engine, request("a", prompt, 3))
    engine.swap(MODELS[1], 1)
    result = batch(engine, request("b", prompt, 3))[0]
    assert set(result.kv_versions) == {1} and engine.prefill_tokens == 60


def test_sessions_do_not_mix_and_the_oldest_idle_one_gives_way() -> None:
    engine = batcher(num_slots=2)
    prompts = {s: np.random.default_rng(i).integers(0, 40, 20).tolist() for i, s in enumerate("abcd")}
    alone = {s: batch(batcher(), request(s, p, seed=7))[0] for s, p in prompts.items()}
    together = batch(engine, *(request(s, p, seed=7) for s, p in prompts.items()))
    for (session, expected), result in zip(alone.items(), together, strict=True):
        assert result.ids == expected.ids, session
        np.testing.assert_allclose(result.logprobs, expected.logprobs, atol=1e-5)
    assert engine.prefill_tokens == 80
    batch(engine, request("d", prompts["d"] + together[3].ids + [1], 2))
    assert engine.prefill_tokens == 82  # the observed token, and the last sampled one
    batch(engine, request("a", prompts["a"] + together[0].ids + [1], 2))
    assert engine.prefill_tokens == 82 + 29  # "a" had given way


@pytest.mark.parametrize("num_others", [0, 1, 7, 31])
def test_neighbours_in_the_batch_change_nothing_beyond_float_tolerance(num_others: int) -> None:
    """Same ids; logprobs to 1e-5 in fp32 (sums are taken in another order in another batch)."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    alone = batch(batcher(), request("x", prompt, 40, seed=11))[0]
    engine = batcher(num_slots=32)
    rng = np.random.default_rng(5)
    others = [
        request(f"o{i}", rng.integers(0, 40, int(rng.integers(1, 30))).tolist(), int(rng.integers(1, 50)), seed=i)
        for i in range(num_others)
    ]
    half = num_others // 2
    result = batch(engine, *others[:half], request("x", prompt, 40, seed=11), *others[half:])[half]
    assert result.ids == alone.ids
    np.testing.assert_allclose(result.logprobs, alone.logprobs, atol=1e-5)


def test_a_resumed_generation_goes_on_as_it_would_have() -> None:
    prompt = [7, 8, 9]
    whole = batch(batcher(), request("a", prompt, 20, seed=3))[0]
    rest = batch(batcher(), request("b", prompt + whole.ids[:9], 11, seed=3))[0]
    assert whole.ids[9:] == rest.ids


def test_a_client_that_lost_its_stream_gets_the_rows_again() -> None:
    engine = batcher()
    prompt = list(range(10))
    first = batch(engine, request("a", prompt, 16, seed=2))[0]
    again = batch(engine, request("a", prompt, 16, seed=2))[0]
    assert again.ids == first.ids and again.row_start == 0 and len(again.kv_versions) == 25
    resumed = batch(engine, request("a", prompt + first.ids[:8], 8, seed=2))[0]
    assert resumed.ids == first.ids[8:] and resumed.row_start == 0


def test_stop_ids_and_lengths() -> None:
    whole = batch(batcher(), request("a", [1, 2, 3], 30, seed=1))[0]
    assert whole.stop_reason == "length" and len(whole.ids) == 30
    stop = whole.ids[5]
    cut = whole.ids[: whole.ids.index(stop) + 1]
    stopped = batch(batcher(), request("a", [1, 2, 3], 30, seed=1, stop_ids=[stop]))[0]
    assert stopped.stop_reason == "stop" and stopped.ids == cut
    assert len(stopped.kv_versions) == len(stopped.routes) == 3 + len(cut) - 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"prompt_ids": [1] * 190, "max_tokens": 11}, "190 prompt tokens .* 11 .* 201.* holds 200"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [1, 40]}, "vocabulary"),
        ({"prompt_ids": [-1]}, "vocabulary"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"allowed_ids": []}, "allowed_ids is empty"),
        ({"allowed_ids": [99]}, "allowed_ids"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(more: dict[str, Any], says: str) -> None:
    fields = {"session": "a", "prompt_ids": [1], "max_tokens": 4, "stop_ids": []} | more

    async def test(engine: EmbeddedEngine) -> None:
        with pytest.raises(RequestRefused, match=says):
            await collect(engine, GenerationRequest(**fields))
        assert len((await collect(engine, request("b", [1] * 190, 10))).ids) == 10

    run(test)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async def wait() -> None:
        while not await condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), DEADLINE_S)


async def first_chunks(engine: EmbeddedEngine, wanted: GenerationRequest) -> tuple[Chunk, AsyncGenerator[Chunk, None]]:
    stream = cast(AsyncGenerator[Chunk, None], engine.generate(wanted))
    return await anext(stream), stream


@pytest.mark.parametrize("mode", ["continue", "recompute", "finish"])
def test_a_swap_in_the_middle_of_a_generation(mode: SwapMode, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [5, 6, 7, 8]
    steps = iter(range(1000))
    compute = Batcher.step

    async def test(engine: EmbeddedEngine) -> None:
        def step(self: Batcher) -> list[Delivery]:
            deadline = time.monotonic() + DEADLINE_S
            hold = next(steps) == 20
            while hold and engine.version == 0 and not engine._swapping and time.monotonic() < deadline:
                time.sleep(0.001)  # the swap comes here, however busy the machine
            return compute(self)

        monkeypatch.setattr(Batcher, "step", step)
        chunk, stream = await first_chunks(engine, request("a", prompt, 190, seed=1))
        swapped = asyncio.create_task(asyncio.to_thread(engine.swap, 1, WEIGHTS[1], fetch_s=0.25))
        chunks = [chunk] + [c async for c in stream]
        assert await swapped
        result = Result(chunks)
        check(result)
        status = await engine.status()
        assert (status.version, status.num_swaps, status.stage) == (1, 2, "ready")
        assert status.last_swap_s["fetch"] == 0.25 and {"prepare", "pause"} < status.last_swap_s.keys()
        after = await collect(engine, request("a", prompt + result.ids[:5], 3))
        assert after.versions == [1, 1, 1]

    def check(result: Result) -> None:
        boundary = result.versions.count(0)
        assert result.versions == [0] * boundary + [1] * (190 - boundary)
        if mode == "finish":
            assert boundary == 190 and set(result.kv_versions) == {0}
            return
        assert 0 < boundary < 190, "the swap came while tokens were sampled"
        # Rows stand as they were when the tokens that follow them were sampled.
        fed_by_0 = result.kv_versions.count(0)
        assert result.kv_versions == [0] * fed_by_0 + [1] * (193 - fed_by_0)
        assert fed_by_0 == len(prompt) + boundary - 1
        ids = prompt + result.ids
        if mode == "recompute":  # tokens after the swap are the new version's own
            with torch.inference_mode():
                out = MODELS[1].forward_packed(torch.tensor(ids), torch.arange(len(ids)), [0, len(ids)])
                expected, _ = MODELS[1].token_logprobs(out.hidden_TD[:-1], torch.tensor(ids[1:]))
            found = result.logprobs[boundary:]
            np.testing.assert_allclose(expected.numpy()[-len(found) :], found, atol=1e-5)
        old = learner_logprobs(MODELS[0], ids[: len(prompt) + boundary], 1.0, result.routes[:fed_by_0])
        np.testing.assert_allclose(old[-boundary:], result.logprobs[:boundary], atol=1e-5)

    run(test, swap_mode=mode)


@pytest.mark.parametrize("mode", ["continue", "recompute", "finish"])
def test_keys_of_an_idle_session_over_a_swap(mode: SwapMode) -> None:
    engine = batcher(swap_mode=mode)
    prompt = list(range(12))
    first = batch(engine, request("a", prompt, 4))[0]
    engine.swap(MODELS[1], 1)
    more = prompt + first.ids + [1, 2]
    second = batch(engine, request("a", more, 4))[0]
    assert second.versions == [1] * 4
    assert engine.prefill_tokens == 12 + (3 if mode == "continue" else len(more))
    assert second.row_start == (15 if mode == "continue" else 0)


def test_loads_that_are_old_repeated_or_damaged_change_nothing() -> None:
    async def test(engine: EmbeddedEngine) -> None:
        assert engine.swap(2, WEIGHTS[2])
        before = await collect(engine, request("a", [1, 2], 6))
        assert not engine.swap(2, WEIGHTS[1]) and not engine.swap(1, WEIGHTS[1])
        tensors = dict(WEIGHTS[1].tensors)
        tensors["model.norm.weight"] = Array.of(np.full(CONFIG.hidden_size, 0x7FC0), "uint16")
        with pytest.raises(ModelError, match=r"model\.norm\.weight"):
            engine.swap(3, Weights(config=WEIGHTS[1].config, tokenizer={}, tensors=tensors))
        other = ModelConfig(**vars(CONFIG) | {"num_layers": 1})
        with pytest.raises(ModelError, match="shape"):
            engine.swap(3, weights_of(init_model(other, 0), {}))
        status = await engine.status()
        assert (status.version, status.refused_loads, status.num_swaps) == (2, 4, 2)
        assert (await collect(engine, request("b", [1, 2], 6))).ids == before.ids

    run(test)


def test_closing_the_stream_frees_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Batcher.step

    async def test(engine: EmbeddedEngine) -> None:
        def step(self: Batcher) -> list[Delivery]:
            deadline = time.monotonic() + DEADLINE_S
            # Nothing goes on while the third waits for a place, until an abort has come.
            while len(self.running) == 2 and self.waiting and not engine._aborted and time.monotonic() < deadline:
                time.sleep(0.001)
            return compute(self)

        monkeypatch.setattr(Batcher, "step", step)
        streams = [(await first_chunks(engine, request(f"s{i}", [i + 1], 199)))[1] for i in range(2)]
        waiting = asyncio.create_task(collect(engine, request("w", [9], 3)))

        async def queued() -> bool:
            return (await engine.status()).waiting == 1

        await until(queued)
        before = (await engine.status()).sampled_tokens
        await streams[0].aclose()
        assert len((await waiting).ids) == 3
        await streams[1].aclose()

        async def idle() -> bool:
            status = await engine.status()
            return status.running == 0 and status.waiting == 0

        await until(idle)
        assert (await engine.status()).sampled_tokens < before + 3 + 199, "the aborted ones went on"

    run(test, num_slots=2, flush_tokens=1)


def test_requests_are_served_in_order_of_arrival() -> None:
    engine = batcher(num_slots=1)
    jobs = [Job(request(str(i), [i + 1], 3)) for i in range(4)]
    for job in jobs:
        engine.submit(job)
    engine.abort(jobs[2])
    finished = []
    with torch.inference_mode():
        while engine.has_work:
            finished += [job for job, chunk in engine.step() if isinstance(chunk, Chunk) and chunk.stop_reason]
    assert finished == [jobs[0], jobs[1], jobs[3]]


def test_a_long_prompt_does_not_stop_those_that_decode() -> None:
    engine = batcher(prefill_tokens=10, flush_tokens=1)
    first, second = Job(request("a", [1], 30)), Job(request("b", [2] * 100, 5))
    engine.submit(first)
    with torch.inference_mode():
        engine.step()
        engine.submit(second)
        for _ in range(9):
            assert [job for job, _ in engine.step()] == [first]


def test_without_weights_or_after_close_it_is_unavailable() -> None:
    async def main() -> None:
        engine = EmbeddedEngine()
        assert (await engine.status()).stage == "loading" and engine.version == -1
        with pytest.raises(EngineUnavailable, match="no weights"):
            await collect(engine, request("a", [1]))
        engine.swap(0, WEIGHTS[0])
        _, stream = await first_chunks(engine, request("a", [1], 200))
        await engine.close()
        with pytest.raises(EngineUnavailable, match="closed"):
            [_ async for _ in stream]
        with pytest.raises(EngineUnavailable, match="closed"):
            await collect(engine, request("a", [1]))
        with pytest.raises(EngineUnavailable):
            engine.swap(1, WEIGHTS[1])
        await engine.close()

    asyncio.run(main())


def test_a_dead_thread_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[BaseException] = []

    async def main() -> None:
        engine = EmbeddedEngine(on_death=died.append)
        engine.swap(0, WEIGHTS[0])

        def fail(self: Batcher) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(Batcher, "step", fail)
        with pytest.raises(EngineUnavailable, match="MemoryError: no room"):
            await collect(engine, request("a", [1]))
        with pytest.raises(EngineUnavailable, match="no room"):
            await engine.status()
        await engine.close()

    asyncio.run(main())
    assert [type(error) for error in died] == [MemoryError]


def test_nan_is_an_error_of_that_version_and_leaves_nothing_behind() -> None:
    engine = batcher(num_slots=2)
    broken = init_model(CONFIG, 0)
    with torch.no_grad():
        broken.embed_VD[39] = float("nan")
    engine.swap(broken, 1)
    engine.submit(Job(request("a", [39] * 20, 4)))
    with torch.inference_mode():
        deliveries = engine.step()
    assert [type(message) for _, message in deliveries] == [EngineError]
    engine.swap(MODELS[2], 2)
    # "c" gets the place of "a", and beside the longer "b" it looks past its own end, where the NaN lay.
    results = batch(engine, request("b", list(range(30)), 4), request("c", [1, 2], 4))
    assert [len(result.ids) for result in results] == [4, 4]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_grammar_is_followed_and_what_could_be_sampled_is_recorded() -> None:
    grammar = Grammar.of([{3: 1, 4: 1}, {5: 2, 6: 2, 7: 2}, {}], [-1, -1, 2])
    wanted = request("a", [1, 2], 5, grammar=grammar, temperature=0.7, seed=3)
    neighbour = request("b", [1, 2, 3], 5)
    found, _ = batch(batcher(), wanted, neighbour)
    assert found.ids[0] in (3, 4) and found.ids[1] in (5, 6, 7)
    assert found.supports == [[3, 4], [5, 6, 7], [], [], []]
    with torch.inference_mode():
        ids = torch.tensor([1, 2, *found.ids[:1]])
        hidden = MODELS[0].forward_packed(ids, torch.arange(3), [0, 3]).hidden_TD
        logits = MODELS[0].logits(hidden) / 0.7
    first = logits[1, [3, 4]].log_softmax(0)[[3, 4].index(found.ids[0])]
    second = logits[2, [5, 6, 7]].log_softmax(0)[[5, 6, 7].index(found.ids[1])]
    assert found.logprobs[:2] == pytest.approx([float(first), float(second)], abs=1e-4)
    rest = batch(batcher(), request("c", [1, 2, *found.ids[:2]], 3, grammar=grammar.after(found.ids[:2]), seed=3))
    assert rest[0].supports == [[], [], []], "a resumed generation goes on where the first one was"


def test_a_grammar_that_cannot_be_followed_is_refused() -> None:
    dead_end = Grammar.of([{3: 1}, {}], [-1, -1])
    with pytest.raises(RequestRefused, match="nothing may come"):
        batcher().check(request("a", [1], grammar=dead_end))
    with pytest.raises(RequestRefused, match="one of them"):
        batcher().check(request("a", [1], grammar=dead_end, allowed_ids=[1], stop_ids=[3]))
