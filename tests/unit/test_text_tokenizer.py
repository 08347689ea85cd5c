"""The tokenizer's files, its numbers and its errors."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tidemill.text.tokenizer import END, SPECIAL_TOKENS, Tokenizer
from tidemill.text.windows import line_edit, window

TEXTS = [window([f"    value_{n} = other[{n}] + {n}", "        return not value"], 0) for n in range(60)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 600)


def test_the_same_texts_give_the_same_files(tokenizer: Tokenizer) -> None:
    assert Tokenizer.train(TEXTS, 600).files() == tokenizer.files()


def test_window_numbers_are_single_tokens_that_no_training_text_needs_to_hold() -> None:
    bare = Tokenizer.train(["nothing"], 464)
    assert all(len(bare.encode(str(number))) == 1 for number in range(100))
    assert bare.vocab_size <= 464


def test_an_indentation_is_one_token_and_a_name_is_the_same_wherever_it_stands(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("12|        return")[2:3] == tokenizer.encode("        ")
    inside, alone = tokenizer.encode("x = value + 1"), tokenizer.encode("value")
    assert any(inside[i : i + len(alone)] == alone for i in range(len(inside)))


def test_transformers_loads_it_with_equal_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS[:5], f"text says {END}", "é🙂  x\n\n"]:
        assert other(text)["input_ids"] == tokenizer.encode(text)
        assert other.decode(tokenizer.encode(text)) == text
    assert other.eos_token_id == tokenizer.special(END)
    assert len(other) == tokenizer.vocab_size


def test_it_loads_from_its_own_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert Tokenizer.from_files(tokenizer.files()).files() == tokenizer.files()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path / "nowhere")


def test_a_vocabulary_too_small_for_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        Tokenizer.train(["a"], 300)


def test_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    assert [tokenizer.special(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))


@pytest.mark.parametrize(
    ("before", "after", "edit"),
    [
        ("    if a < b and c < d:", "    if a < b and c <= d:", ("c < ", "c <= ")),
        ("return x", "return not x", ("return ", "return not ")),
        ("x = a", "x = a + 1", ("a", "a + 1")),
        ("x = a", "y = a", ("x", "y")),
    ],
)
def test_line_edits_are_short_and_unambiguous(before: str, after: str, edit: tuple[str, str]) -> None:
    assert line_edit(before, after) == edit


def test_a_window_numbers_its_lines_from_one() -> None:
    assert window(["a", "b", "c", "d"], 1, 2) == "1|b\n2|c"
    with pytest.raises(ValueError, match="num_lines"):
        window(["a"], 0, 100)
