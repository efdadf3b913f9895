"""Other people's vocabularies -> our tokenizers. Symbols by number in; which tokenizer, and why, out. Knows no files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_xl.data.text import tokenizers
from transformer_xl.errors import DataError, ImportRefused

CORPORA = {"wt103": "wikitext-103", "wt2": "wikitext-2"}
"""Their names of corpora that we call otherwise."""
UNITS = {"byte": "bits_per_character", "char": "bits_per_character", "word": "perplexity_per_word"}


@dataclass(frozen=True, kw_only=True)
class ForeignVocabulary:
    tokenizer: tokenizers.Tokenizer
    reason: str
    dataset: str | None = None
    file: Path | None = None
    """Its own, where it has one."""

    @property
    def corpus(self) -> str:
        return CORPORA.get(self.dataset or "", self.dataset or "unknown")

    @property
    def unit(self) -> str:
        return UNITS.get(self.tokenizer.kind, "perplexity_per_word")


def numbers_only(size: int) -> ForeignVocabulary:
    return ForeignVocabulary(
        tokenizer=tokenizers.NumberTokenizer(size),
        reason="no vocabulary was found, so text is written as token numbers; import again with one to have words",
    )


def choose_tokenizer(facts: Mapping[str, Any], *, name: Path) -> ForeignVocabulary:
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
            return ForeignVocabulary(
                tokenizer=tokenizers.ByteTokenizer(values, dropped=dropped), reason=reason, dataset=dataset
            )
    if all(len(symbol) == 1 for symbol in symbols) and " " not in symbols:
        characters = "".join(" " if symbol == "_" else symbol for symbol in symbols)
        reason = "its symbols are single characters, _ a space"
        return ForeignVocabulary(
            tokenizer=tokenizers.CharTokenizer(characters, lower=lower), reason=reason, dataset=dataset
        )
    sentences = tokenizers.END_OF_LINE not in symbols and tokenizers.SENTENCE in symbols
    try:
        tokenizer = tokenizers.WordTokenizer(symbols, marks="sentences" if sentences else "lines", lower=lower)
    except DataError:
        raise ImportRefused(
            f"{name}: the vocabulary of {len(symbols):,} words has neither {tokenizers.END_OF_LINE} nor {tokenizers.SENTENCE}, so that lines cannot be told"
        ) from None
    mark = f"sentences between {tokenizers.SENTENCE}" if sentences else f"{tokenizers.END_OF_LINE} at the end of a line"
    return ForeignVocabulary(tokenizer=tokenizer, reason=f"its symbols are words, {mark}", dataset=dataset)


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
