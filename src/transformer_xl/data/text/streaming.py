"""Tokens of a text that never ends: bytes come in as they are there, tokens go out with their places, equal to those of the whole text at once.

A piece is encoded as soon as it can be cut where the tokenizer would cut too:

    byte   anywhere
    char   between characters; in lower-cased text after white space, for a Greek sigma looks at its neighbours
    word   after white space; where lines are sentences, after a line
    number after white space
    bpe    between a word and the space or (unless lower-cased) punctuation mark after it, which byte pairs never cross

Bytes that are no UTF-8 are refused by name, or for byte and bpe taken as they are.
"""

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from transformer_xl.data.text.tokenizers import (
    ANY_BYTES,
    ByteTokenizer,
    Ids,
    NumberTokenizer,
    Tokenizer,
    WordTokenizer,
    code_points,
    escaped,
    unescaped,
)
from transformer_xl.errors import DataError

LONGEST_CHARACTERS = 1 << 20
"""So much text without a place to cut it is refused: memory must not grow with the text."""
AFTER_SPACE = re.compile(r"(?<=\s)")
AFTER_LINE = re.compile(r"(?<=\n)")
ANYWHERE = re.compile(r"(?!^)")
BEFORE_SPACE = re.compile(r"(?<=\S)(?=[ \n\t])")
BETWEEN_PAIRS = re.compile(r"(?<=\S)(?=[ \n\t])|(?<=[^\W_])(?=[,.;:!?，。、；：！？])")


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Tokens of a stream, and the byte at which each begins in it."""

    token_P: Ids
    offset_P: Ids


def token_stream(tokenizer: Tokenizer, stream: Iterable[bytes], *, name: str) -> Iterator[Placed]:
    """Each piece as soon as it is certain; the last when the stream ends. `name` is what errors call the stream."""
    offset = 0
    for piece in stream if isinstance(tokenizer, ByteTokenizer) else _pieces(tokenizer, stream, name=name):
        placed = _placed(tokenizer, piece, name=f"{name}, counted from byte {offset:,}")
        if len(placed.token_P):
            yield Placed(token_P=placed.token_P, offset_P=offset + placed.offset_P)
        offset += len(piece) if isinstance(piece, bytes) else len(unescaped(piece))


def placed_tokens(tokenizer: Tokenizer, data: bytes, *, name: str) -> Placed:
    """The tokens of a text that is there whole."""
    if isinstance(tokenizer, ByteTokenizer):
        return _placed(tokenizer, data, name=name)
    text, rest = _whole_characters(tokenizer, data, name=name, offset=0)
    return _placed(tokenizer, text + _unfinished(tokenizer, rest, name=name, offset=len(data) - len(rest)), name=name)


def _placed(tokenizer: Tokenizer, piece: str | bytes, *, name: str) -> Placed:
    try:
        whole = unescaped(piece) if isinstance(piece, str) and tokenizer.kind in ANY_BYTES else piece
        token_P = tokenizer.encode(whole)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    return Placed(token_P=token_P, offset_P=_places(tokenizer, piece, token_P))


def _pieces(tokenizer: Tokenizer, stream: Iterable[bytes], *, name: str) -> Iterator[str]:
    """The text, cut only where the tokenizer would cut; what is no UTF-8 in it, `escaped`."""
    raw, text, offset, cut = b"", "", 0, _cut_rule(tokenizer)
    for data in stream:
        decoded, raw = _whole_characters(tokenizer, raw + data, name=name, offset=offset)
        offset += len(unescaped(decoded))
        text += decoded
        if end := _last_match(cut, text):
            yield text[:end]
            text = text[end:]
        elif len(text) > LONGEST_CHARACTERS:
            raise DataError(
                f"{name} has {len(text):,} characters before byte {offset:,} without a place to cut them; break the line"
            )
    if text := text + _unfinished(tokenizer, raw, name=name, offset=offset):
        yield text


def _cut_rule(tokenizer: Tokenizer) -> re.Pattern[str]:
    if isinstance(tokenizer, WordTokenizer):
        return AFTER_LINE if tokenizer.marks == "sentences" else AFTER_SPACE
    if isinstance(tokenizer, NumberTokenizer):
        return AFTER_SPACE
    if tokenizer.kind == "char":
        return AFTER_SPACE if tokenizer.lower else ANYWHERE
    return BEFORE_SPACE if tokenizer.lower else BETWEEN_PAIRS


def _last_match(cut: re.Pattern[str], text: str) -> int:
    """The last place to cut at, 0 where there is none. Looked for from the end on, in steps: usually it is near."""
    if cut is ANYWHERE:
        return len(text)
    step = 256
    while True:
        low = max(0, len(text) - step)
        places = [match.start() for match in cut.finditer(text, low)]
        if places and places[-1] > 0:
            return places[-1]
        if not low:
            return 0
        step *= 8


def _whole_characters(tokenizer: Tokenizer, data: bytes, *, name: str, offset: int) -> tuple[str, bytes]:
    """The text, and the bytes of a character that is not all there yet."""
    errors = "surrogateescape" if tokenizer.kind in ANY_BYTES else "strict"
    try:
        text, used = codecs.utf_8_decode(data, errors, False)
    except UnicodeDecodeError as error:
        raise _not_utf8(data, error.start, name=name, offset=offset) from None
    return text, data[used:]


def _unfinished(tokenizer: Tokenizer, raw: bytes, *, name: str, offset: int) -> str:
    """The beginning of a character that the text ends with."""
    if raw and tokenizer.kind not in ANY_BYTES:
        raise _not_utf8(raw, 0, name=name, offset=offset)
    return escaped(raw)


def _not_utf8(data: bytes, place: int, *, name: str, offset: int) -> DataError:
    where = f"byte {offset + place:,} ({data[place]:#04x})"
    return DataError(f"{name} is not UTF-8 at {where}; convert it, or take a model of bytes or byte pairs")


def _places(tokenizer: Tokenizer, piece: str | bytes, token_P: Ids) -> Ids:
    """The byte of the piece at which each token begins."""
    if isinstance(piece, bytes):
        dropped = tokenizer.dropped if isinstance(tokenizer, ByteTokenizer) else b""
        return np.flatnonzero(~np.isin(np.frombuffer(piece, dtype=np.uint8), np.frombuffer(dropped, dtype=np.uint8)))
    byte_of = _byte_places(piece)
    if isinstance(tokenizer, WordTokenizer):
        return byte_of[_word_places(piece, sentences=tokenizer.marks == "sentences")]
    if isinstance(tokenizer, NumberTokenizer):
        return byte_of[[match.start() for match in re.finditer(r"\S+", piece)]]
    lengths = [len(tokenizer.decode_bytes([token])) for token in token_P.tolist()]
    place_P = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return _before_lowering(piece, byte_of)[place_P] if tokenizer.lower else place_P


def _byte_places(text: str) -> Ids:
    """The byte at which each character begins, and the end. An escaped byte is a lone surrogate, and one byte."""
    code_T = code_points(text)
    size_T = 1 + (code_T > 0x7F) + (code_T > 0x7FF).astype(np.int64) + (code_T > 0xFFFF)
    size_T[(code_T >= 0xDC80) & (code_T <= 0xDCFF)] = 1
    return np.concatenate([[0], np.cumsum(size_T)]).astype(np.int64)


def _before_lowering(text: str, byte_of: Ids) -> Ids:
    """For each byte of the lower-cased text, where the character it was made of begins."""
    sizes = [len(unescaped(character.lower())) for character in text]
    return np.repeat(byte_of[:-1], sizes)


def _word_places(text: str, *, sentences: bool) -> list[int]:
    """The character at which each word or mark begins."""
    if not sentences:
        return [match.start() for match in re.finditer(r"\n|\S+", text)]
    places, start = [], 0
    for line in text.split("\n"):
        end = start + len(line)
        if line.strip():
            places += [start, *(start + match.start() for match in re.finditer(r"\S+", line))]
            places += [end] if end < len(text) else []
        start = end + 1
    return places
