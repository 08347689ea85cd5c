"""Chunks to a generation: nothing is filled in, all arrays are cut together."""

import math

import numpy as np
import pytest

from tidemill.core.errors import EngineError
from tidemill.core.grammar import Grammar
from tidemill.core.records import Array
from tidemill.core.seams import Chunk
from tidemill.episodes.generation import GenerationBuilder, Sampling, append_rows


def builder(sampling: Sampling | None = None, max_tokens: int = 10) -> GenerationBuilder:
    return GenerationBuilder(
        position=3, prompt_ids=[1, 2], max_tokens=max_tokens, sampling=sampling or Sampling(), engine="e"
    )


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        (Chunk(token_ids=[1, 2], logprobs=[-1.0], versions=[0, 0]), "none may be missing"),
        (Chunk(token_ids=[1], logprobs=[-1.0], versions=[]), "none may be missing"),
        (Chunk(token_ids=[1], logprobs=[math.nan], versions=[0]), "no logprob"),
        (Chunk(token_ids=[1], logprobs=[-math.inf], versions=[0]), "no logprob"),
        (Chunk(token_ids=[1], logprobs=[0.5], versions=[0]), "no logprob"),
        (Chunk(token_ids=[1] * 11, logprobs=[-1.0] * 11, versions=[0] * 11), "left of the budget"),
    ],
)
def test_chunks_that_break_the_contract_raise(chunk: Chunk, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        builder().add(chunk)


def test_supports_are_kept_per_token_and_a_missing_one_raises() -> None:
    part = builder(Sampling(top_k=2))
    part.add(Chunk(token_ids=[5, 6], logprobs=[-0.1, -0.2], versions=[0, 0], supports=[[5, 9], [6]]))
    part.add(Chunk(token_ids=[7], logprobs=[-0.3], versions=[1], supports=[[7, 8, 9]], stop_reason="stop"))
    generation = part.build("stop")
    assert generation.support_ids is not None and generation.support_offsets is not None
    assert generation.support_ids.numpy().tolist() == [5, 9, 6, 7, 8, 9]
    assert generation.support_offsets.numpy().tolist() == [0, 2, 3, 6]
    with pytest.raises(EngineError, match="supports"):
        builder(Sampling(top_p=0.9)).add(Chunk(token_ids=[5], logprobs=[-0.1], versions=[0]))
    with pytest.raises(EngineError, match="outside its support"):
        builder(Sampling(top_p=0.9)).add(Chunk(token_ids=[5], logprobs=[-0.1], versions=[0], supports=[[6]]))


def test_an_engine_that_does_not_keep_to_the_grammar_is_found_out() -> None:
    grammar = Grammar.of([{5: 1, 6: 1}, {}], [-1, 1])

    def part() -> GenerationBuilder:
        return GenerationBuilder(
            position=0, prompt_ids=[1], max_tokens=9, sampling=Sampling(), engine="e", grammar=grammar
        )

    def said(token: int, support: list[int]) -> Chunk:
        return Chunk(token_ids=[token], logprobs=[-0.1], versions=[0], supports=[support])

    fine = part()
    fine.add(said(5, [5, 6]))
    fine.add(said(77, []))
    assert fine.grammar is not None and fine.grammar.start == 1
    for token, support, says in (
        (7, [], "grammar allows 2"),
        (7, [7], "grammar allows 2"),
        (7, [5, 6], "may not come"),
    ):
        with pytest.raises(EngineError, match=says):
            part().add(said(token, support))
    with pytest.raises(EngineError, match="supports"):
        part().add(Chunk(token_ids=[5], logprobs=[-0.1], versions=[0]))


def test_a_chunk_behind_the_last_one_raises() -> None:
    part = builder()
    part.add(Chunk(token_ids=[], logprobs=[], versions=[], stop_reason="stop"))
    with pytest.raises(EngineError, match="behind its last"):
        part.add(Chunk(token_ids=[], logprobs=[], versions=[]))


def test_rows_that_do_not_fit_together_raise() -> None:
    rows = Array.of([0, 0], "int32")
    with pytest.raises(EngineError, match="rows of routes"):
        builder().add(
            Chunk(
                token_ids=[],
                logprobs=[],
                versions=[],
                stop_reason="abort",
                kv_versions=rows,
                routes=Array.of(np.zeros((3, 1, 1)), "uint16"),
            )
        )
    part = builder()
    part.add(Chunk(token_ids=[], logprobs=[], versions=[], stop_reason="abort", kv_versions=rows))
    part.begin_stream()
    with pytest.raises(EngineError, match="none in another"):
        part.add(
            Chunk(
                token_ids=[],
                logprobs=[],
                versions=[],
                stop_reason="stop",
                kv_versions=rows,
                routes=Array.of(np.zeros((2, 1, 1)), "uint16"),
            )
        )


@pytest.mark.parametrize(
    ("start", "rows", "new_start", "new_rows", "merged"),
    [
        (4, [1, 1], 6, [2], [1, 1, 2]),
        (4, [1, 1], 0, [2] * 8, [1, 1, 2, 2]),
        (4, [1, 1], 8, [2], [1, 1, -1, -1, 2]),
        (4, [1, 1, 1], 4, [2], [1, 1, 1]),
        (4, [1, 1], 9, [], [1, 1]),
        (4, [], 4, [2, 2], [2, 2]),
    ],
)
def test_old_rows_stand_new_ones_follow_and_gaps_are_marked(
    start: int, rows: list[int], new_start: int, new_rows: list[int], merged: list[int]
) -> None:
    assert append_rows(start, np.array(rows, int), new_start, np.array(new_rows, int), -1).tolist() == merged


@pytest.mark.parametrize(
    "values", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}]
)
def test_sampling_is_checked_when_made(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Sampling(**values)  # type: ignore[arg-type]
