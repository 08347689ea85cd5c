"""Names as single tokens: whatever the text, its ids give it back, and the glossary alone reads them."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.records import Observation, ToolCall
from tidemill.core.seams import ToolSpec
from tidemill.text.compact import CompactRenderer
from tidemill.text.glossary import Glossary
from tidemill.text.tokenizer import NUM_NAMES, Tokenizer

SOURCE = """def merge_with(func, *dictionaries):
    for dictionary in dictionaries:
        if func <= dictionary: return 12
"""
TOKENIZER = Tokenizer.train([SOURCE, "edit", "test"], 470)
words = st.sampled_from(
    ["merge_with", "dictionaries", " ", "\n", "=", "x", "12|", "if ", "not ", "ünïcödé", "\ud800", "("]
)
texts = st.one_of(st.text(max_size=60), st.lists(words, max_size=30).map("".join))
TOOLS = (ToolSpec(name="edit", description="", parameters={"old": "string", "new": "string"}, required=("old", "new")),)


@given(st.one_of(st.text(max_size=60), st.lists(words, max_size=30).map("".join)).filter(str.isprintable))
def test_pieces_encoded_alone_are_what_the_library_makes_of_the_whole(text: str) -> None:
    library = tokenizers.Tokenizer.from_str(TOKENIZER.files()["tokenizer.json"].decode())
    library.encode_special_tokens = True
    assert TOKENIZER.encode(text) == library.encode(text, add_special_tokens=False).ids


@given(texts, texts)
def test_text_comes_back_byte_for_byte_under_the_glossary_of_any_other(opening: str, text: str) -> None:
    glossary = Glossary.of(TOKENIZER, opening)
    ids = glossary.encode(text)
    assert glossary.decode_bytes(ids) == text.encode("utf-8", "surrogatepass")
    assert Glossary(TOKENIZER, glossary.words).decode_bytes(ids) == text.encode("utf-8", "surrogatepass")
    assert not TOKENIZER.special_ids & set(ids)


def test_a_long_name_is_one_token_wherever_it_stands_and_a_short_one_keeps_its_own() -> None:
    glossary = Glossary.of(TOKENIZER, SOURCE + "\nunheard_of + x")
    assert len(glossary.encode("unheard_of")) == 1
    assert "x" not in glossary.words
    assert glossary.encode("x") == TOKENIZER.encode("x")


def test_the_words_beyond_the_last_name_token_are_spelt() -> None:
    text = " + ".join(
        f"zzq{'qzw'[n % 3]}{'abcdefghij'[n // 3 % 10]}{'klmnopqrst'[n // 30]}" for n in range(NUM_NAMES + 9)
    )
    glossary = Glossary.of(TOKENIZER, text)
    assert len(glossary.words) == NUM_NAMES
    assert glossary.decode_bytes(glossary.encode(text)).decode() == text


def test_a_name_token_without_a_word_is_malformed() -> None:
    renderer = CompactRenderer(TOKENIZER)
    renderer.open(TOOLS, "unheard_of")
    said = renderer.say([ToolCall(id="", name="edit", arguments={"old": "unheard_of", "new": "x"})])
    assert renderer.parse(said, TOOLS, 0).calls[0].arguments["old"] == "unheard_of"
    strange = [TOKENIZER.name_ids[-1] if id_ == TOKENIZER.name_ids[0] else id_ for id_ in said]
    assert renderer.parse(strange, TOOLS, 0).errors[0].error == "malformed"
    with pytest.raises(ValueError, match="stands for no word"):
        Glossary(TOKENIZER, renderer.glossary).decode_bytes(strange)


def test_an_observation_uses_the_names_of_the_opening() -> None:
    renderer = CompactRenderer(TOKENIZER)
    renderer.open(TOOLS, "unheard_of")
    ids = renderer.observe([Observation(call_id="", text="unheard_of")], 9)
    assert TOKENIZER.name_ids[0] in ids
