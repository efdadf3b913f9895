"""Tokens become text as it is certain: the same as decoding all at once, in whole characters, and never a piece of a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.data.text.tokenizers import (
    BytePairTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    WordTokenizer,
)
from transformer_xl.decoding import TextStream, start_tokens, text_pieces
from transformer_xl.errors import InputError

PAIRS = BytePairTokenizer.learn(iter(["naïve 🎼 music, the 🎼 of 音楽 and 音"] * 20), size=300, lower=False, show=False)
LINES = WordTokenizer(["<eos>", "<unk>", "a", "cat", "sat"])
SENTENCES = WordTokenizer(["<S>", "<UNK>", "a", "cat", "sat"], marks="sentences")
TOKENIZERS = [ByteTokenizer(), PAIRS, LINES, SENTENCES]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(TOKENIZERS), st.integers(0, 8))
def test_streamed_is_the_text_decoded_at_once(data, tokenizer, cut):
    """Any tokens, also ones that make broken characters, after any tokens before them."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=30))
    whole = tokenizer.decode(ids)
    assert "".join(text_pieces(tokenizer, ids)) == whole
    before = ids[:cut]
    if "\ufffd" not in tokenizer.decode(before):
        assert tokenizer.decode(before) + "".join(text_pieces(tokenizer, ids[cut:], before=before)) == whole


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), PAIRS])
def test_characters_come_whole(tokenizer):
    text = "naïve 🎼 – ok 音楽"
    pieces = list(text_pieces(tokenizer, tokenizer.encode(text).tolist()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_begun_before_is_finished():
    first, *rest = ByteTokenizer().encode("é!").tolist()
    assert list(text_pieces(ByteTokenizer(), rest, before=[first])) == ["é", "!"]


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab\n", max_size=20),
    st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_is_cut_before_the_stop_that_is_complete_first(text, stops):
    stream, shown = TextStream(ByteTokenizer(), stop=stops), ""
    cut = next((end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)), None)
    expected = text
    if cut is not None:
        expected = text[: cut - max(len(stop) for stop in stops if text[:cut].endswith(stop))]
    for token in ByteTokenizer().encode(text).tolist():
        shown += stream.push(token)
        assert expected.startswith(shown)  # nothing that is taken back later was ever shown
        if stream.stopped:
            break
    assert shown + stream.finish() == expected
    assert stream.stopped == (cut is not None)


def test_a_stop_string_within_one_token_and_over_several():
    for stop in ("usic", "ve 🎼 m", "🎼"):
        text = "naïve 🎼 music"
        assert "".join(text_pieces(PAIRS, PAIRS.encode(text).tolist(), stop=[stop])) == text[: text.index(stop)]


def test_no_token_is_taken_after_the_stop():
    tokens = iter(ByteTokenizer().encode("one. two").tolist())
    assert "".join(text_pieces(ByteTokenizer(), tokens, stop=["."])) == "one"
    assert bytes(tokens) == b" two"


def test_the_work_for_a_token_does_not_grow():
    """Nothing but the current token is ever decoded."""

    class Counting(ByteTokenizer):
        longest = 0

        def decode_bytes(self, ids):
            self.longest = max(self.longest, len(ids))
            return super().decode_bytes(ids)

    tokenizer = Counting()
    stream = TextStream(tokenizer, stop=["never"])
    for _ in range(2000):
        stream.push(110)
    assert tokenizer.longest == 1
    assert len(stream._held) == 1


def test_an_empty_stop_is_named():
    with pytest.raises(InputError, match="an empty text stops everything"):
        TextStream(ByteTokenizer(), stop=[""])


@pytest.mark.parametrize(
    ("tokenizer", "start"),
    [
        (ByteTokenizer(), [10]),
        (ByteTokenizer(b" abc"), [0]),  # no lines, as in text8: after a space
        (ByteTokenizer(b"abc", dropped=b"\n"), [0]),
        (CharTokenizer("ab\n"), [2]),
        (LINES, [0]),
        (SENTENCES, [0]),
    ],
)
def test_an_empty_prompt_starts_sensibly(tokenizer: Tokenizer, start):
    assert start_tokens(tokenizer, "") == start


def test_a_prompt_outside_the_vocabulary_is_named():
    with pytest.raises(InputError, match="the prompt does not fit this model's vocabulary: character 'c' at offset 2"):
        start_tokens(CharTokenizer("ab"), "abc")
    assert start_tokens(LINES, "a dog") == [2, 1]  # a word model has a token for what it does not know
