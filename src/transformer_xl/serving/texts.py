"""Text that came in -> tokens with their places in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformer_xl.data.streaming import token_stream
from transformer_xl.data.tokenizers import Tokenizer, WordTokenizer
from transformer_xl.errors import DataError
from transformer_xl.generation.text import TextStream
from transformer_xl.serving.bodies import Given
from transformer_xl.serving.limits import PROMPT_TOKENS
from transformer_xl.serving.refusals import Refusal

TOO_LONG = f"the text is longer than {PROMPT_TOKENS:,} tokens; send it in pieces to a session"
UNKNOWN = "the text holds something that is not in this model's vocabulary; leave it out"


@dataclass(frozen=True, kw_only=True)
class PlacedTokens:
    tokens: list[int]
    spans: list[tuple[int, int]]
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


def _of_text(tokenizer: Tokenizer, text: str) -> PlacedTokens:
    data = text.encode("utf-8")
    tokens, starts = list[int](), list[int]()
    try:
        for piece in token_stream(tokenizer, [data], name="the text"):
            tokens += piece.token_P.tolist()
            starts += piece.offset_P.tolist()
    except DataError:
        raise Refusal(422, UNKNOWN) from None
    if not tokens:
        raise Refusal(422, "the text holds no tokens; give at least one")
    if len(tokens) > PROMPT_TOKENS:
        raise Refusal(422, TOO_LONG)
    character_of = _characters(data)
    spans = []
    for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
        first, last = character_of[start], character_of[end - 1] + 1 if end > start else character_of[start]
        if isinstance(tokenizer, WordTokenizer):  # white space after a word is nobody's
            last = first + (len(text[first:last].rstrip()) or 1)
        spans.append((first, last))
    return PlacedTokens(tokens=tokens, spans=spans)


def _characters(data: bytes) -> list[int]:
    """For each byte and the end, the character that it belongs to."""
    found, character = [], -1
    for byte in data:
        character += byte & 0xC0 != 0x80
        found.append(character)
    return [*found, character + 1]


def _of_tokens(tokenizer: Tokenizer, tokens: list[int]) -> PlacedTokens:
    """Places in the text that the tokens stand for."""
    stream = TextStream(tokenizer)
    parts = [stream.bytes_of(token) for token in tokens]
    character_of, spans, at = _characters(b"".join(parts)), list[tuple[int, int]](), 0
    for part in parts:
        first = max(0, character_of[at]) + (isinstance(tokenizer, WordTokenizer) and part.startswith(b" "))
        spans.append((first, max(first, character_of[at + len(part) - 1] + 1) if part else first))
        at += len(part)
    return PlacedTokens(tokens=tokens, spans=spans)
