"""Words of the text at hand as single tokens, given back exactly.

A name that the merges would spell in several tokens stands, in one episode, for one of the tokenizer's `name_ids`: the
first such word of the opening text for the first id, and so on. A small policy then points at a name instead of
spelling it, and no mistake in spelling is possible; any other name can still be spelt. The mapping is bijective, is
fixed by the opening text alone, and is kept with the episode (`Segment.glossary`), so that its ids can always be read.
"""

from collections.abc import Iterable, Sequence
from typing import final

from tidemill.text.tokenizer import Tokenizer, pieces


@final
class Glossary:
    """The words of one episode, in order of the ids that stand for them."""

    def __init__(self, tokenizer: Tokenizer, words: Sequence[str] = ()) -> None:
        """Raises `ValueError` for more words than the tokenizer has ids for, or a word that comes twice."""
        if len(words) > len(tokenizer.name_ids) or len(set(words)) != len(words):
            raise ValueError(f"{len(words)} words for {len(tokenizer.name_ids)} name tokens: give each word once")
        self._tokenizer = tokenizer
        self.words = tuple(words)
        self._id_of = dict(zip(words, tokenizer.name_ids[: len(words)], strict=True))
        self._bytes_of = {id_: word.encode("utf-8", "surrogatepass") for word, id_ in self._id_of.items()}
        self._strange = frozenset(tokenizer.name_ids) - self._bytes_of.keys()

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str) -> "Glossary":
        """Of a text: its first names that take more than one token."""
        words: dict[str, None] = {}
        for piece in pieces(text):
            if len(words) == len(tokenizer.name_ids):
                break
            if (piece[0].isalpha() or piece[0] == "_") and len(tokenizer.encode_piece(piece)) > 1:
                words[piece] = None
        return cls(tokenizer, list(words))

    def encode(self, text: str) -> list[int]:
        """Ids of the text; no special token among them."""
        ids: list[int] = []
        for piece in pieces(text):
            id_ = self._id_of.get(piece)
            if id_ is None:
                ids += self._tokenizer.encode_piece(piece)
            else:
                ids.append(id_)
        return ids

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """The exact bytes. Raises `ValueError` for a name token that stands for nothing here, and for a strange id."""
        found: list[bytes] = []
        for id_ in token_ids:
            if id_ in self._strange:
                raise ValueError(f"name token {id_} stands for no word: this text has {len(self.words)}")
            word = self._bytes_of.get(id_)
            found.append(self._tokenizer.decode_bytes([id_]) if word is None else word)
        return b"".join(found)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text for people; what is no UTF-8 becomes U+FFFD, a name token without a word its own name."""
        words = self._bytes_of
        parts = [words[id_].decode("utf-8", "replace") if id_ in words else id_ for id_ in token_ids]
        return "".join(_decoded(parts, self._tokenizer))


def _decoded(parts: Iterable[str | int], tokenizer: Tokenizer) -> Iterable[str]:
    """Runs of ids decoded together: a character may span several tokens."""
    run: list[int] = []
    for part in parts:
        if isinstance(part, str):
            yield tokenizer.decode(run)
            run = []
            yield part
        else:
            run.append(part)
    yield tokenizer.decode(run)
