"""Tokenised documents as rows of a fixed number of tokens, in a seeded order, with a position that resumes exactly.

A document is cut where a row ends and goes on in the next one; pieces never see each other (packing gives each its own
positions), so the first token of a piece is context and is not predicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import xxhash
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]
    """Loss weight of each token; 0: context alone. The first token's is never used."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or len(self.tokens) == 0 or self.tokens.shape != self.weights.shape:
            raise ValueError(
                f"a document of shape {self.tokens.shape} with weights of shape {self.weights.shape}: "
                "give one weight per token, and at least one token"
            )
        if not (np.isfinite(self.weights).all() and (self.weights >= 0).all()):
            raise ValueError("a loss weight is negative or not finite: give 0 for a token that is not to be learnt")


def document(tokens: Sequence[int], weights: Sequence[float] | float = 1.0) -> Document:
    """From plain sequences; one weight stands for all tokens."""
    array = np.asarray(tokens, np.int32)
    return Document(tokens=array, weights=np.array(np.broadcast_to(np.asarray(weights, np.float32), array.shape)))


@final
class EpochOrder:
    """Indices 0..num−1 in a new shuffled order every epoch, each once per epoch; resumes at any position."""

    def __init__(self, num: int, seed: int) -> None:
        if num < 1:
            raise ValueError("nothing to go through: give at least one item")
        self.num = num
        self.seed = seed
        self.epoch = 0
        self.index = 0
        self._order = self._shuffled(0)

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, epoch)).permutation(self.num)

    @property
    def current(self) -> int:
        return int(self._order[self.index])

    def advance(self) -> None:
        self.index += 1
        if self.index == self.num:
            self.seek(self.epoch + 1, 0)

    def seek(self, epoch: int, index: int) -> None:
        if epoch < 0 or not 0 <= index < self.num:
            raise ValueError(f"epoch {epoch}, index {index}: no position among {self.num} items")
        self.epoch, self.index = epoch, index
        self._order = self._shuffled(epoch)

    def take(self, num: int) -> list[int]:
        """The next `num` indices, running on into the next epoch."""
        taken = []
        for _ in range(num):
            taken.append(self.current)
            self.advance()
        return taken


@final
class Corpus:
    """An endless stream of rows. `position` after any row, given to `seek` of an equal corpus, goes on from there."""

    def __init__(self, documents: Sequence[Document], *, row_tokens: int, seed: int, whole: bool = False) -> None:
        """`whole`: a document that does not fit into what is left of a row begins the next one, and rows are shorter;
        only a document that is longer than a row is cut."""
        if row_tokens < 2:
            raise ValueError(f"row_tokens is {row_tokens}: a row needs at least a token and its successor")
        self.documents = documents
        self.row_tokens = row_tokens
        self._whole = whole
        self._order = EpochOrder(len(documents), seed)
        self._offset = 0
        self._fingerprint = _fingerprint(documents, f"{row_tokens} {seed} {whole}")

    def next_row(self) -> tuple[Document, ...]:
        """Pieces of documents, `row_tokens` tokens in all; fewer where documents stay whole."""
        pieces: list[Document] = []
        room = self.row_tokens
        while room:
            source = self.documents[self._order.current]
            if self._whole and pieces and self._offset == 0 and len(source.tokens) > room:
                break
            end = min(self._offset + room, len(source.tokens))
            here = slice(self._offset, end)
            pieces.append(Document(tokens=source.tokens[here], weights=source.weights[here]))
            room -= end - self._offset
            self._offset = end
            if end == len(source.tokens):
                self._order.advance()
                self._offset = 0
        return tuple(pieces)

    def next_rows(self, num: int) -> list[tuple[Document, ...]]:
        return [self.next_row() for _ in range(num)]

    @property
    def epoch(self) -> int:
        return self._order.epoch

    @property
    def position(self) -> dict[str, int]:
        """Plain numbers, for `Learner.position`."""
        return {
            "epoch": self._order.epoch,
            "index": self._order.index,
            "offset": self._offset,
            "corpus": self._fingerprint,
        }

    def seek(self, position: Mapping[str, Any]) -> None:
        """Raises `ValueError` for a position in another corpus, row length or seed."""
        if position.get("corpus") != self._fingerprint:
            raise ValueError("the position is of another corpus, row length or seed: start the stage anew")
        self._order.seek(position["epoch"], position["index"])
        self._offset = position["offset"]


def _fingerprint(documents: Sequence[Document], settings: str) -> int:
    state = xxhash.xxh3_64()
    state.update(f"{settings} {len(documents)}".encode())
    for entry in documents:
        state.update(len(entry.tokens).to_bytes(8, "little"))
        state.update(entry.tokens.tobytes())
        state.update(entry.weights.tobytes())
    return state.intdigest() >> 1  # fits a signed 64-bit integer
