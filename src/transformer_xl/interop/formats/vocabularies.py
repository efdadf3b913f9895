"""Other people's vocabularies -> our tokenizers. Symbols by number in; which tokenizer, and why, out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_xl.data.text.tokenizers import (
    END_OF_LINE,
    SENTENCE,
    ByteTokenizer,
    CharTokenizer,
    NumberTokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
)
from transformer_xl.errors import DataError, ImportRefused
from transformer_xl.interop.asking import read_foreign

LARGEST_TEXT = 256 << 20
CORPORA = {"wt103": "wikitext-103", "wt2": "wikitext-2"}
"""Their names of corpora that we call otherwise."""
UNITS = {"byte": "bits_per_character", "char": "bits_per_character", "word": "perplexity_per_word"}


@dataclass(frozen=True, kw_only=True)
class Chosen:
    tokenizer: Tokenizer
    reason: str
    dataset: str | None = None

    @property
    def corpus(self) -> str:
        return CORPORA.get(self.dataset or "", self.dataset or "unknown")

    @property
    def unit(self) -> str:
        return UNITS.get(self.tokenizer.kind, "perplexity_per_word")


def numbers_only(size: int) -> Chosen:
    return Chosen(
        tokenizer=NumberTokenizer(size),
        reason="no vocabulary was found, so text is written as token numbers; import again with one to have words",
    )


def read_vocabulary_file(path: Path, *, scratch: Path) -> Chosen:
    """A text file with a symbol a line, a pickled vocabulary of any of the formats, or a folder with a tokenizer of ours, such as a data store."""
    if path.is_dir():
        return Chosen(tokenizer=load_tokenizer(path), reason=f"the tokenizer of {path.name}")
    if not path.is_file():
        raise ImportRefused(f"there is no vocabulary {path}")
    if path.suffix == ".txt":
        return choose_tokenizer({"symbols": _lines(path)}, name=path)
    scratch.mkdir()
    facts = read_foreign({"vocabulary": path}, folder=scratch)["vocabulary"].facts
    if "vocabulary" not in facts:
        raise ImportRefused(f"{path} holds no vocabulary")
    return choose_tokenizer(facts["vocabulary"], name=path)


def choose_tokenizer(facts: Mapping[str, Any], *, name: Path) -> Chosen:
    """By the symbols themselves: what they are tells how text was cut into them."""
    symbols: list[str] = facts["symbols"]
    dataset, lower = facts.get("dataset"), bool(facts.get("lower_case"))
    if wrong := _unwritable(symbols):
        raise ImportRefused(f"{name}: {wrong}")
    if all(len(symbol) <= 3 and symbol.isascii() and symbol.isdigit() and int(symbol) < 256 for symbol in symbols):
        values = bytes(map(int, symbols))
        if len(set(values)) == len(values):
            dropped = b"" if 10 in values else b"\n"
            reason = "its symbols are numbers of bytes" + (", the newline not among them" if dropped else "")
            return Chosen(tokenizer=ByteTokenizer(values, dropped=dropped), reason=reason, dataset=dataset)
    if all(len(symbol) == 1 for symbol in symbols) and " " not in symbols:
        characters = "".join(" " if symbol == "_" else symbol for symbol in symbols)
        reason = "its symbols are single characters, _ a space"
        return Chosen(tokenizer=CharTokenizer(characters, lower=lower), reason=reason, dataset=dataset)
    sentences = END_OF_LINE not in symbols and SENTENCE in symbols
    try:
        tokenizer = WordTokenizer(symbols, marks="sentences" if sentences else "lines", lower=lower)
    except DataError:
        raise ImportRefused(
            f"{name}: the vocabulary of {len(symbols):,} words has neither {END_OF_LINE} nor {SENTENCE}, so that lines cannot be told"
        ) from None
    mark = f"sentences between {SENTENCE}" if sentences else f"{END_OF_LINE} at the end of a line"
    return Chosen(tokenizer=tokenizer, reason=f"its symbols are words, {mark}", dataset=dataset)


def _lines(path: Path) -> list[str]:
    if path.stat().st_size > LARGEST_TEXT:
        raise ImportRefused(f"{path} has {path.stat().st_size:,} bytes, too many for a vocabulary")
    try:
        symbols = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise ImportRefused(f"{path} is no vocabulary: it is not UTF-8") from None
    symbols = [symbol.removesuffix("\r") for symbol in symbols]
    if "" in symbols or len(set(symbols)) != len(symbols):
        raise ImportRefused(f"{path} is no vocabulary: it has an empty line, or a symbol twice")
    return symbols


def _unwritable(symbols: list[str]) -> str:
    """Why the symbols cannot stand in a text file, one a line; empty where they can."""
    text = "\n".join(symbols)
    if text.count("\n") != len(symbols) - 1:
        return "a symbol of the vocabulary holds a line break"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "a symbol of the vocabulary holds half a character, which no UTF-8 can hold"
    return ""
