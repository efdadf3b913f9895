"""A stream cut anywhere gives the tokens of the whole text, each at its own byte."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.data.text import streaming
from transformer_xl.data.text.streaming import token_stream
from transformer_xl.data.text.tokenizers import BytePairTokenizer, ByteTokenizer, CharTokenizer, WordTokenizer
from transformer_xl.errors import DataError

ALPHABET = "ab'rΣσςİé音，.,\n\t 1²_-\u00a0\u3000"
LEARNED = ["it's ab ab, ab.  ab\n\nab 're Σab 音音，音 11²  é\tb"] * 20
CHARACTERS = "".join(sorted(set(ALPHABET + ALPHABET.lower() + "\u0307")))
WORDS = ["a", "b", "ab", "ba", "1", "é", "."]
TOKENIZERS = {
    "byte": ByteTokenizer(),
    "byte without newlines": ByteTokenizer(dropped=b"\n"),
    "char": CharTokenizer(CHARACTERS),
    "char lower": CharTokenizer(CHARACTERS, lower=True),
    "word": WordTokenizer(["<eos>", "<unk>", *WORDS]),
    "word lower": WordTokenizer(["<eos>", "<unk>", *WORDS], lower=True),
    "sentences": WordTokenizer(["<S>", "<UNK>", *WORDS], marks="sentences"),
    "bpe": BytePairTokenizer.learn(iter(LEARNED), size=290, lower=False, show=False),
    "bpe lower": BytePairTokenizer.learn(iter(LEARNED), size=290, lower=True, show=False),
}


def chunks(data, places):
    cuts = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[low:high] for low, high in pairwise(cuts)]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(text=st.text(ALPHABET, max_size=60), places=st.lists(st.integers(0, 200), max_size=12))
def test_streamed_equals_whole(kind, text, places):
    tokenizer, data = TOKENIZERS[kind], text.encode()
    found = list(token_stream(tokenizer, chunks(data, places), name="text"))
    tokens = [int(token) for piece in found for token in piece.token_P]
    offsets = [int(offset) for piece in found for offset in piece.offset_P]
    assert tokens == tokenizer.encode(text).tolist()
    assert len(offsets) == len(tokens)
    assert offsets == sorted(offsets)
    if tokenizer.kind != "word" and not tokenizer.lower:  # what begins at a token's byte is the token
        for token, offset in zip(tokens, offsets, strict=True):
            assert data[offset:].startswith(tokenizer.decode_bytes([token]))


@pytest.mark.parametrize("kind", ["byte", "bpe", "bpe lower"])
@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.binary(max_size=6) | st.text(ALPHABET, max_size=12).map(str.encode), max_size=8),
    places=st.lists(st.integers(0, 200), max_size=12),
)
def test_any_bytes_streamed_equal_the_whole(kind, parts, places):
    tokenizer, data = TOKENIZERS[kind], b"".join(parts)
    found = list(token_stream(tokenizer, chunks(data, places), name="bytes"))
    tokens = [int(token) for piece in found for token in piece.token_P]
    offsets = [int(offset) for piece in found for offset in piece.offset_P]
    assert tokens == tokenizer.encode(data).tolist()
    assert len(offsets) == len(tokens)
    if not tokenizer.lower:
        assert tokenizer.decode_bytes(tokens) == data
        for token, offset in zip(tokens, offsets, strict=True):
            assert data[offset:].startswith(tokenizer.decode_bytes([token]))


def test_a_text_with_half_a_character_is_refused_where_bytes_with_it_are_not():
    tokenizer = TOKENIZERS["bpe"]
    with pytest.raises(DataError, match="lone surrogate"):
        tokenizer.encode("ab\udce9")
    assert tokenizer.decode_bytes(tokenizer.encode(b"ab\xe9 ab")) == b"ab\xe9 ab"
    assert tokenizer.encode("ab é".encode()).tolist() == tokenizer.encode("ab é").tolist()


@pytest.mark.parametrize("kind", ["word", "word lower", "sentences"])
def test_a_words_place_is_where_it_stands(kind):
    data = "  é A ab\n\n  ba unheard \n a".encode()
    tokenizer = TOKENIZERS[kind]
    for piece in token_stream(tokenizer, [data], name="text"):
        for token, offset in zip(piece.token_P.tolist(), piece.offset_P.tolist(), strict=True):
            word = tokenizer.token(token)
            if word not in ("<S>", "<eos>", "<unk>", "<UNK>"):
                assert data[offset:].decode().lower().startswith(word)
            elif word == "<eos>":
                assert data[offset : offset + 1] == b"\n"


def test_lowered_characters_keep_their_place():
    found = list(token_stream(TOKENIZERS["char lower"], ["İa Σb".encode()], name="text"))
    offsets = np.concatenate([piece.offset_P for piece in found]).tolist()
    assert offsets == [0, 0, 2, 3, 4, 6]  # İ becomes two characters, both made of the same two bytes


def test_tokens_come_before_the_stream_ends():
    def endless():
        while True:
            yield b"ab ab, ab\n"

    for tokenizer in TOKENIZERS.values():
        if tokenizer.kind != "byte":
            assert len(next(token_stream(tokenizer, endless(), name="text")).token_P)


def test_what_is_no_text_is_named_with_its_byte(monkeypatch):
    char, byte = TOKENIZERS["char"], ByteTokenizer(b"ab")
    with pytest.raises(DataError, match=r"standard input is not UTF-8 at byte 5 \(0xe9\); convert it"):
        list(token_stream(char, [b"aba", b"ab\xe9ab"], name="standard input"))
    with pytest.raises(DataError, match=r"is not UTF-8 at byte 2 \(0xe9\)"):
        list(token_stream(char, [b"ab\xe9"], name="text"))  # the stream ends inside a character
    with pytest.raises(DataError, match="text, counted from byte 2: byte 0x63 at offset 1 is not among"):
        list(token_stream(byte, [b"ab", b"ac"], name="text"))
    assert [int(i) for piece in token_stream(ByteTokenizer(), [b"\xe9\xff"], name="t") for i in piece.token_P] == [
        233,
        255,
    ]
    monkeypatch.setattr(streaming, "LONGEST_CHARACTERS", 10)
    with pytest.raises(DataError, match="12 characters before byte 12 without a place to cut them; break the line"):
        list(token_stream(TOKENIZERS["word"], [b"aaaaaa"] * 3, name="text"))
