"""A byte-level BPE tokenizer for code, kept as the two files that `transformers.AutoTokenizer` loads.

What is written between brackets below is one piece for the merges to work in: `12`, `|`, a run of spaces, a name, a
keyword or an operator with the single spaces around it. So a name is the same tokens wherever it stands in a line (a
small policy has to copy it), an indentation is one token, and a number is read two digits at a time, 0 to 99 being
in the vocabulary by force.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TASK, OBS, CALL, ARG, END, PAD = "<|task|>", "<|obs|>", "<|call|>", "<|arg|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, TASK, OBS, CALL, ARG, END)
"""In order of id, from 0."""
NUM_NAMES = 48
NAME_TOKENS = [f"<|name{number}|>" for number in range(NUM_NAMES)]
"""Behind the special tokens: each stands for one word of the text at hand, as `text.glossary` says."""

_KEYWORDS = (
    "and|as|assert|break|class|continue|def|del|elif|else|except|finally|for|from|if|import|in|is|lambda|not|or|pass"
    "|raise|return|try|while|with|yield"
)
PIECES = (
    r"[0-9]{1,2}"  # numbers, two digits at a time
    r"|(?<=[0-9])\|"  # between a line's number and its text
    r"| {2,}"  # indentation
    rf"| ?\b(?:{_KEYWORDS})\b(?: (?!\s))?"
    r"|(?<![\W\d]) [^\W\d]+"  # a word of prose behind another one
    r"|[^\W\d]+"  # names and words
    r"| ?[^\s\w]+(?: (?!\s))?"  # operators and punctuation
    r"|\n+|\s|\w"
)
"""The pieces that merges never cross; read alike by `re` and by the library's own engine."""

_NUM_BYTES = 256
_MAX_PIECES_KEPT = 100_000
_TWO_DIGITS = [f"{tens}{ones}" for tens in "0123456789" for ones in "0123456789"]


@final
class Tokenizer:
    """Text to ids and back. `encode` never yields a special token, whatever the text says."""

    def __init__(self, tokenizer_json: str) -> None:
        self._inner = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._inner.encode_special_tokens = True
        self._json = tokenizer_json
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
        if missing:
            raise ValueError(f"tokenizer without {missing}: train it with Tokenizer.train, or use another renderer")
        self._specials = {token: vocabulary[token] for token in SPECIAL_TOKENS}
        self.special_ids = frozenset(self._specials.values())
        self.name_ids = [vocabulary[token] for token in NAME_TOKENS if token in vocabulary]
        """Ids that stand for words; none in a tokenizer that was made without them."""
        to_byte = _byte_of_character()
        reserved = {*self._specials, *NAME_TOKENS}
        self._bytes: dict[int, bytes] = {
            id_: token.encode() if token in reserved else bytes(to_byte[character] for character in token)
            for token, id_ in vocabulary.items()
        }
        self._of_byte = {byte: character for character, byte in to_byte.items()}
        self._pieces: dict[str, list[int]] = {}
        self.vocab_size = max(vocabulary.values()) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn merges from `texts`; the same texts give the same tokenizer. The vocabulary has at most
        `vocab_size` entries: special tokens, names, bytes, numbers, then merges while the texts bring any."""
        reserved = [*SPECIAL_TOKENS, *NAME_TOKENS]
        fixed = len(reserved) + _NUM_BYTES + len(_TWO_DIGITS)
        if vocab_size < fixed:
            raise ValueError(f"vocab_size {vocab_size} is too small: at least {fixed} for bytes, numbers and specials")
        learner = tokenizers.Tokenizer(models.BPE())
        learner.pre_tokenizer = _pre_tokenizer()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        learner.train_from_iterator(
            texts,
            trainers.BpeTrainer(vocab_size=vocab_size - len(reserved), initial_alphabet=alphabet, show_progress=False),
        )
        learned: list[list[str]] = json.loads(learner.to_str())["model"]["merges"]
        merges = list(dict.fromkeys([(pair[0], pair[1]) for pair in _TWO_DIGITS] + [(a, b) for a, b in learned]))
        vocabulary = {token: id_ for id_, token in enumerate([*reserved, *alphabet])}
        kept = []
        for left, right in merges:
            if len(vocabulary) == vocab_size and left + right not in vocabulary:
                break
            vocabulary.setdefault(left + right, len(vocabulary))
            kept.append((left, right))
        whole = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=kept))
        whole.pre_tokenizer = _pre_tokenizer()
        whole.decoder = decoders.ByteLevel()
        whole.add_special_tokens(reserved)
        return cls(whole.to_str(pretty=False))

    # --- files -----------------------------------------------------------------------------------------------

    def files(self) -> dict[str, bytes]:
        """File name → content, in the Hugging Face layout."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "split_special_tokens": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1 << 30,
        }
        return {
            "tokenizer.json": self._json.encode(),
            "tokenizer_config.json": (json.dumps(config, indent=1, sort_keys=True) + "\n").encode(),
        }

    @classmethod
    def from_files(cls, files: dict[str, bytes]) -> "Tokenizer":
        """Inverse of `files`. Raises `ValueError` where `tokenizer.json` is missing or not ours."""
        if "tokenizer.json" not in files:
            raise ValueError(f"no tokenizer.json among {sorted(files)}")
        return cls(files["tokenizer.json"].decode())

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (folder / name).write_bytes(content)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"no tokenizer.json in {folder}")
        return cls.from_files({"tokenizer.json": path.read_bytes()})

    # --- ids -------------------------------------------------------------------------------------------------

    def special(self, token: str) -> int:
        """Id of one of `SPECIAL_TOKENS`."""
        return self._specials[token]

    def encode(self, text: str) -> list[int]:
        """Ids of the text; never a special token. Lone surrogates go in as the three bytes that name them."""
        return [id_ for piece in pieces(text) for id_ in self.encode_piece(piece)]

    def encode_piece(self, piece: str) -> list[int]:
        """Ids of one of `pieces(text)`."""
        ids = self._pieces.get(piece)
        if ids is None:
            characters = "".join(self._of_byte[byte] for byte in piece.encode("utf-8", "surrogatepass"))
            ids = [token.id for token in self._inner.model.tokenize(characters)]
            if len(self._pieces) >= _MAX_PIECES_KEPT:
                self._pieces.clear()
            self._pieces[piece] = ids
        return ids

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """The exact bytes; special tokens as their names. Raises `ValueError` for an id outside the vocabulary."""
        pieces = []
        for id_ in token_ids:
            piece = self._bytes.get(id_)
            if piece is None:
                raise ValueError(f"id {id_} is not in the vocabulary of {self.vocab_size}")
            pieces.append(piece)
        return b"".join(pieces)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text for people: what is no UTF-8, or no id, becomes U+FFFD; `decode_bytes` is exact."""
        return b"".join(self._bytes.get(id_, b"\xff") for id_ in token_ids).decode("utf-8", "replace")


def pieces(text: str) -> list[str]:
    """The text cut where no token crosses: where to cut an edit, so that its parts are tokens of the line."""
    cut = re.findall(PIECES, text)
    if "".join(cut) != text:
        raise AssertionError("the pattern leaves characters out")
    return cut


def common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many leading items are equal."""
    num = 0
    for a, b in zip(left, right, strict=False):  # of different lengths on purpose
        if a != b:
            break
        num += 1
    return num


def _pre_tokenizer() -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet (GPT-2): printable bytes stand for themselves, the others are moved up from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return table
