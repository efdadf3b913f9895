"""enwik8 and text8: one file of 100 MB, one symbol per byte, split by position. The whole is held in memory, once."""

import hashlib
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from transformer_xl.console import progress
from transformer_xl.data.corpora import encoding
from transformer_xl.data.corpora.recipes import SPLITS_MD5, Counts, Recipe
from transformer_xl.data.corpora.sources import Source, find_known
from transformer_xl.data.store import Encoded, Manifest, SplitRecord, SplitWriter, encoded_by, smallest_dtype
from transformer_xl.data.text.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer
from transformer_xl.errors import DataError

PAGE = rb"^  <page>\n"
STRIDE = 1 << 22


def fill_symbols(
    recipe: Recipe,
    place: Path,
    folder: Path,
    scratch: Path,
    newlines: Literal["keep", "drop"],
    wanted: tuple[str, ...],
) -> tuple[Manifest, Tokenizer, Counts]:
    """What was written, and what must have come out."""
    source = _one_file(recipe, place, scratch)
    with progress(f"reading {recipe.name}", total=source.disk_bytes, unit="bytes") as advance:
        text = source.read(advance=advance)
    symbols = np.frombuffer(text, dtype=np.uint8)
    dropped = b"\n" if newlines == "drop" else b""
    values = bytes(int(value) for value in _values(symbols) if value not in dropped)
    tokenizer: Tokenizer = (
        ByteTokenizer(values, dropped=dropped) if recipe.name == "enwik8" else CharTokenizer(values.decode("ascii"))
    )
    starts = np.asarray([match.start() for match in re.finditer(PAGE, text, re.MULTILINE)], dtype=np.int64)
    records = []
    begin = 0
    with progress(f"encoding {recipe.name}", total=len(symbols), unit="bytes") as advance:
        for split in recipe.splits:
            end = begin + recipe.counts.tokens[split]
            if split in wanted:
                _check_split(recipe, split, text[begin:end])
                inside = starts[(starts >= begin) & (starts < end)]
                record = _write_symbols(folder, split, symbols, begin, end, inside, tokenizer, values, advance)
                records.append(record)
            begin = end
    rule = recipe.rule if newlines == "keep" else "bytes as the paper's code read them, newlines dropped; 90M / 5M / 5M"
    counts = recipe.counts if newlines == "keep" else recipe.alternatives["newlines dropped"]
    assert source.known is not None
    manifest = Manifest(
        name=recipe.name,
        rule=rule,
        unit=recipe.unit,
        documents=recipe.documents,
        origin={source.known.name: f"md5:{source.known.md5}"},
        splits=tuple(records),
        **encoded_by(tokenizer),
    )
    return manifest, tokenizer, counts


def _one_file(recipe: Recipe, place: Path, scratch: Path) -> Source:
    known = recipe.files[0]
    found = find_known(recipe.files, source=place, scratch=scratch)[known.name]
    if not found:
        raise DataError(
            f"{place} holds no {known.described}; give `source=` the file, or the folder or archive with it"
        )
    return found[0]


def _values(symbols: NDArray[np.uint8]) -> NDArray[np.int64]:
    # In strides: numpy counts in 64-bit integers, eight times the text.
    counts = np.zeros(256, dtype=np.int64)
    for begin in range(0, len(symbols), STRIDE):
        counts += np.bincount(symbols[begin : begin + STRIDE], minlength=256)
    return np.flatnonzero(counts)


def _check_split(recipe: Recipe, split: str, text: bytes) -> None:
    found = hashlib.md5(text, usedforsecurity=False).hexdigest()
    assert found == SPLITS_MD5[recipe.name][split], f"{recipe.name} {split} was cut at the wrong byte"


def _write_symbols(
    folder: Path,
    split: str,
    symbols: NDArray[np.uint8],
    begin: int,
    end: int,
    page_starts: NDArray[np.int64],
    tokenizer: Tokenizer,
    values: bytes,
    advance: Any,
) -> SplitRecord:
    """A table of 256 entries turns bytes into tokens; 255 stands for a byte that is dropped (fewer than 255 values exist)."""
    table = np.full(256, 255, dtype=np.uint8)
    table[np.frombuffer(values, dtype=np.uint8)] = np.arange(len(values))
    with SplitWriter(folder=folder, name=split, vocabulary=tokenizer.size) as writer:
        for here in range(begin, end, STRIDE):
            stop = min(here + STRIDE, end)
            ids = table[symbols[here:stop]]
            kept = ids != 255
            inside = page_starts[(page_starts >= here) & (page_starts < stop)] - here
            # A page's position among the tokens is the number of bytes kept before it.
            positions = np.cumsum(kept)[inside] - 1 if len(inside) else inside
            writer.append(
                Encoded(
                    tokens=ids[kept].astype(smallest_dtype(tokenizer.size)),
                    document_starts=positions,
                    sentence_starts=inside[:0],
                    bytes=stop - here,
                    characters=encoding.count_characters(symbols[here:stop].tobytes()),
                    words=None,
                )
            )
            advance(stop - here)
        return writer.finish()
