"""Tokenizers: what goes in comes out, saved and loaded again."""

import numpy as np
import pytest
from data_helpers import patient
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data.text.tokenizers import (
    BytePairTokenizer,
    ByteTokenizer,
    CharTokenizer,
    WordTokenizer,
    load_tokenizer,
)
from transformer_xl.errors import DataError

LEARNED = BytePairTokenizer.learn(
    iter(["the cat sat on the mat, the cat ate\n", "日本語 日本語\n"] * 5), size=300, lower=False, show=False
)
WORDS = WordTokenizer(["<eos>", "<unk>", "the", "cat", "sat"])
SENTENCES = WordTokenizer(["<S>", "<UNK>", "the", "cat", "sat"], marks="sentences")
LINES = st.lists(st.lists(st.sampled_from(["the", "cat", "sat"]), min_size=1).map(" ".join))


@patient
@given(text=st.text())
def test_bytes_come_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()


@patient
@given(data=st.binary())
def test_bytes_that_are_no_text_come_back(data):
    assert ByteTokenizer().decode_bytes(ByteTokenizer().encode(data)) == data


@patient
@given(text=st.text())
def test_characters_come_back(text):
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text)


@patient
@given(text=st.text())
def test_byte_pairs_come_back(text):
    ids = LEARNED.encode(text)
    assert LEARNED.decode(ids) == text
    assert LEARNED.decode_bytes(ids) == text.encode()


@patient
@given(lines=LINES)
def test_words_come_back(lines):
    text = "".join(f"{line}\n" for line in lines)
    for tokenizer in (WORDS, SENTENCES):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@patient
@given(text=st.text())
def test_any_text_becomes_words(text):
    ids = WORDS.encode(text)
    assert (ids == WORDS.mark).sum() == text.count("\n") + text.split().count("<eos>")
    assert len(ids) == len(text.split()) + text.count("\n")


def test_words_and_marks():
    assert WORDS.encode("the cat\n\nsat dog").tolist() == [2, 3, 0, 0, 4, 1]
    assert SENTENCES.encode("the cat\nsat dog").tolist() == [0, 2, 3, 0, 0, 4, 1]
    assert SENTENCES.decode([0, 2, 3, 0, 0, 4]) == "the cat\nsat"


def test_dropped_newlines_vanish():
    tokenizer = ByteTokenizer(b"ab", dropped=b"\n")
    assert tokenizer.encode("a\nb\n").tolist() == [0, 1]


def test_lower_case():
    assert CharTokenizer("abc", lower=True).encode("ABC").tolist() == [0, 1, 2]
    assert WordTokenizer(["<eos>", "<unk>", "the"], lower=True).encode("The THE").tolist() == [2, 2]


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (ByteTokenizer(), "anything: é\n"),
        (ByteTokenizer(b"ab", dropped=b"\n"), "ab"),
        (CharTokenizer("\n aé\u2028𝄞"), "aé 𝄞\u2028\n"),
        (CharTokenizer("ab", lower=True), "ab"),
        (WORDS, "the cat\n"),
        (SENTENCES, "the cat\n"),
        (LEARNED, "the cat 日本\n"),
    ],
)
def test_saved_and_loaded_again(tokenizer, text, tmp_path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert type(loaded) is type(tokenizer)
    assert (loaded.size, loaded.lower) == (tokenizer.size, tokenizer.lower)
    assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert loaded.decode(loaded.encode(text)) == text
    assert [loaded.token(id) for id in range(loaded.size)] == [tokenizer.token(id) for id in range(tokenizer.size)]


def test_readable_names():
    assert ByteTokenizer().token(32) == "space"
    assert ByteTokenizer().token(200) == "0xc8"
    assert CharTokenizer("\n\u200b").token(1) == "U+200B"
    assert WORDS.token(3) == "cat"


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda: ByteTokenizer(b"ab").encode("abc"), "0x63 at offset 2"),
        (lambda: CharTokenizer("ab").encode("ab\u00e9"), "'é' at offset 2"),
        (lambda: CharTokenizer("").encode("a"), "'a' at offset 0"),
        (lambda: CharTokenizer("ab").encode(b"a\xff"), "not UTF-8 at byte 1"),
        (lambda: WordTokenizer(["<eos>", "a"]).encode("b"), "'b'"),
        (lambda: WordTokenizer(["a"]), "<eos>"),
        (lambda: ByteTokenizer().encode("\ud800"), "surrogate"),
        (lambda: LEARNED.encode("a\ud800"), "surrogate"),
        (lambda: ByteTokenizer().decode([256]), "token 256"),
        (lambda: WORDS.decode([-1]), "token -1"),
    ],
)
def test_what_cannot_be_is_named(act, named):
    with pytest.raises(DataError, match=named):
        act()


def test_folders_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"kind": "chars"}')
    with pytest.raises(DataError, match="did you mean char"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"kind": "bpe", "lower": false}')
    (tmp_path / "bpe.json").write_text("{}")
    with pytest.raises(DataError, match="no tokenizer of ours"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="no tokenizer of ours"):
        load_tokenizer(tmp_path)
