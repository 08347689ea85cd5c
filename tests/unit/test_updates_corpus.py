"""The stream of rows: every token once per epoch, and the same stream after any stop."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.updates.corpus import Corpus, Document, EpochOrder, document


def numbered(lengths: list[int]) -> list[Document]:
    """Documents whose tokens are all different: 100·document + place."""
    return [document([100 * i + j for j in range(n)], [float(j) for j in range(n)]) for i, n in enumerate(lengths)]


def ids(rows: list[tuple[Document, ...]]) -> list[list[list[int]]]:
    return [[piece.tokens.tolist() for piece in row] for row in rows]


documents_lengths = st.lists(st.integers(1, 23), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(documents_lengths, st.integers(2, 17), st.integers(0, 5), st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_a_stopped_stream_goes_on_as_if_it_had_not(
    lengths: list[int], row_tokens: int, seed: int, stops: list[int]
) -> None:
    """Stop and resume again and again, through JSON, at row and epoch boundaries alike."""
    documents = numbered(lengths)
    num = sum(stops) + 5
    expected = ids(Corpus(documents, row_tokens=row_tokens, seed=seed).next_rows(num))
    found, position = [], Corpus(documents, row_tokens=row_tokens, seed=seed).position
    for stop in [*stops, 5]:
        corpus = Corpus(documents, row_tokens=row_tokens, seed=seed)
        corpus.seek(json.loads(json.dumps(position)))
        found += ids(corpus.next_rows(stop))
        position = corpus.position
    assert found == expected


@settings(max_examples=40, deadline=None)
@given(documents_lengths, st.integers(2, 17), st.integers(0, 5))
def test_an_epoch_holds_every_token_once_in_rows_of_one_size(lengths: list[int], row_tokens: int, seed: int) -> None:
    documents = numbered(lengths)
    total = sum(lengths)
    rows = Corpus(documents, row_tokens=row_tokens, seed=seed).next_rows(-(-total // row_tokens))
    assert all(sum(len(piece.tokens) for piece in row) == row_tokens for row in rows)
    flat = [(int(t), float(w)) for row in rows for p in row for t, w in zip(p.tokens, p.weights, strict=True)]
    assert sorted(flat[:total]) == sorted((100 * i + j, float(j)) for i, n in enumerate(lengths) for j in range(n))


def test_an_epoch_boundary_is_exact() -> None:
    corpus = Corpus(numbered([4, 4]), row_tokens=4, seed=3)
    first, second = ids(corpus.next_rows(2))
    assert sorted([first[0], second[0]]) == [[0, 1, 2, 3], [100, 101, 102, 103]]
    assert (corpus.position["epoch"], corpus.position["index"], corpus.position["offset"]) == (1, 0, 0)


def test_orders_differ_by_seed_and_by_epoch_and_repeat() -> None:
    first, same, other = EpochOrder(50, 1), EpochOrder(50, 1), EpochOrder(50, 2)
    epoch_0, epoch_1 = first.take(50), first.take(50)
    assert sorted(epoch_0) == sorted(epoch_1) == list(range(50))
    assert epoch_0 != epoch_1
    assert same.take(100) == epoch_0 + epoch_1
    assert other.take(50) != epoch_0


@pytest.mark.parametrize("change", ["tokens", "weights", "row_tokens", "seed"])
def test_a_position_in_another_corpus_is_refused(change: str) -> None:
    position = Corpus(numbered([5, 6]), row_tokens=4, seed=0).position
    documents = numbered([5, 6])
    if change == "tokens":
        documents[1] = Document(tokens=documents[1].tokens + 1, weights=documents[1].weights)
    if change == "weights":
        documents[1] = Document(tokens=documents[1].tokens, weights=documents[1].weights + 1)
    other = Corpus(documents, row_tokens=5 if change == "row_tokens" else 4, seed=1 if change == "seed" else 0)
    with pytest.raises(ValueError, match="another corpus"):
        other.seek(position)


def test_bad_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        document([])
    with pytest.raises(ValueError, match="negative"):
        document([1, 2], [1.0, -1.0])
    with pytest.raises(ValueError, match="one weight per token"):
        Document(tokens=np.arange(3, dtype=np.int32), weights=np.ones(2, np.float32))
    with pytest.raises(ValueError, match="at least one item"):
        Corpus([], row_tokens=4, seed=0)
    with pytest.raises(ValueError, match="row_tokens is 1"):
        Corpus(numbered([3]), row_tokens=1, seed=0)
