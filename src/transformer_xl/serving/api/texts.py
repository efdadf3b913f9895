"""Text that came in -> tokens with their places in it, and tokens -> their names in an answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from transformer_xl.data.text.display import readable
from transformer_xl.data.text.streaming import Placed, token_stream
from transformer_xl.data.text.tokenizers import Tokenizer, WordTokenizer
from transformer_xl.decoding.text import TextStream
from transformer_xl.errors import DataError
from transformer_xl.serving.api.bodies import Given
from transformer_xl.serving.api.refusals import Refusal
from transformer_xl.serving.http.aside import SMALL
from transformer_xl.serving.http.sending import as_json
from transformer_xl.serving.limits import PROMPT_TOKENS

TOO_LONG = f"the text is longer than {PROMPT_TOKENS:,} tokens; send it in pieces to a session"
UNKNOWN = "the text holds something that is not in this model's vocabulary; leave it out"
PART_BYTES = 16 * 1024
"""So much of a text becomes tokens at a time."""
NAMES = 1 << 14
"""So many tokens' names are remembered: making one takes longer than anything else in an answer."""

Places = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PlacedTokens:
    tokens: list[int]
    start_P: Places
    end_P: Places
    """Of each token in the text, in characters; tokens inside one character share it."""


def placed(tokenizer: Tokenizer, given: Given) -> PlacedTokens:
    if given.tokens is not None:
        return _of_tokens(tokenizer, checked(tokenizer, given.tokens))
    assert given.text is not None
    return _of_text(tokenizer, given.text)


def checked(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    if max(tokens) >= tokenizer.size:
        raise Refusal(422, f"tokens: this model's vocabulary ends at {tokenizer.size - 1:,}")
    return list(tokens)


def tokens_of(tokenizer: Tokenizer, data: bytes) -> Iterator[Placed]:
    """The tokens of a text, part by part, no more of them than a request may have."""
    parts, found = (data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)), 0
    try:
        for piece in token_stream(tokenizer, parts, name="the text"):
            found += len(piece.token_P)
            if found > PROMPT_TOKENS:
                raise Refusal(422, TOO_LONG)
            yield piece
    except DataError:
        raise Refusal(422, UNKNOWN) from None


def _of_text(tokenizer: Tokenizer, text: str) -> PlacedTokens:
    data = text.encode("utf-8")
    pieces = list(tokens_of(tokenizer, data))
    if not pieces:
        raise Refusal(422, "the text holds no tokens; give at least one")
    tokens = [token for piece in pieces for token in piece.token_P.tolist()]
    byte_P = np.concatenate([piece.offset_P for piece in pieces])
    end_P = np.append(byte_P[1:], len(data))
    character_of = _characters(data)
    first_P = character_of[byte_P]
    last_P = np.where(end_P > byte_P, character_of[end_P - 1] + 1, first_P)
    if isinstance(tokenizer, WordTokenizer):  # white space after a word is nobody's
        spans = zip(first_P.tolist(), last_P.tolist(), strict=True)
        last_P = np.array([first + (len(text[first:last].rstrip()) or 1) for first, last in spans])
    return PlacedTokens(tokens=tokens, start_P=first_P, end_P=last_P)


def _characters(data: bytes) -> Places:
    """For each byte and the end, the character that it belongs to."""
    begins = (np.frombuffer(data, dtype=np.uint8) & 0xC0) != 0x80
    return np.append(begins.cumsum() - 1, begins.sum())


def _of_tokens(tokenizer: Tokenizer, tokens: list[int]) -> PlacedTokens:
    """Places in the text that the tokens stand for."""
    words = isinstance(tokenizer, WordTokenizer)
    if words or len(tokens) <= SMALL:
        parts = list(map(TextStream(tokenizer).bytes_of, tokens))
    else:
        parts = list(map(_all_bytes(tokenizer).__getitem__, tokens))
    length_P = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    begin_P = length_P.cumsum() - length_P
    character_of = _characters(b"".join(parts))
    start_P = np.maximum(0, character_of[begin_P])
    if words:  # the space before a word is nobody's
        start_P += np.fromiter((part.startswith(b" ") for part in parts), dtype=np.bool_, count=len(parts))
    end_P = np.where(length_P > 0, np.maximum(start_P, character_of[begin_P + length_P - 1] + 1), start_P)
    return PlacedTokens(tokens=tokens, start_P=start_P, end_P=end_P)


@lru_cache(maxsize=64)
def _all_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Of every token: asked for one by one, those of a long text would take longer than reading it."""
    return [tokenizer.decode_bytes([token]) for token in range(tokenizer.size)]


@lru_cache(maxsize=NAMES)
def json_name(tokenizer: Tokenizer, token: int) -> str:
    """What a token is called, as JSON."""
    return as_json(readable(tokenizer, token))


@lru_cache(maxsize=64)
def longest_name(tokenizer: Tokenizer) -> int:
    """Bytes of the longest of a model's names, as JSON."""
    return max(len(as_json(readable(tokenizer, token))) for token in range(tokenizer.size))
