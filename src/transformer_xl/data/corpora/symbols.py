"""enwik8 and text8: one file of 100 MB, one symbol per byte, split by position. The whole is held in memory, once."""

import hashlib
import re
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from transformer_xl.console import progress
from transformer_xl.data.corpora import encoding
from transformer_xl.data.corpora.recipes import SPLITS_MD5, Counts, Recipe
from transformer_xl.data.corpora.sources import find_known
from transformer_xl.data.store import Encoded, Manifest, SplitWriter, encoded_by
from transformer_xl.data.text.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer
from transformer_xl.errors import DataError

PAGE = rb"^  <page>\n"
STRIDE = 1 << 22


def fill_symbols(
    recipe: Recipe, place: Path, folder: Path, scratch: Path, newlines: Literal["keep", "drop"], wanted: tuple[str, ...]
) -> tuple[Manifest, Tokenizer, Counts]:
    """What was written, and what must have come out."""
    known = recipe.files[0]
    found = find_known(recipe.files, source=place, scratch=scratch)[known.name]
    if not found:
        raise DataError(f"{place} holds no {known.described}; give `source=` the file, or a folder or archive with it")
    source = found[0]
    with progress(f"reading {recipe.name}", total=source.disk_bytes, unit="bytes") as advance:
        text = source.read(advance=advance)
    symbols = np.frombuffer(text, dtype=np.uint8)
    dropped = b"\n" if newlines == "drop" else b""
    values = bytes(int(value) for value in _values(symbols) if value not in dropped)
    tokenizer: Tokenizer = (
        ByteTokenizer(values, dropped=dropped) if recipe.name == "enwik8" else CharTokenizer(values.decode("ascii"))
    )
    starts = np.asarray([match.start() for match in re.finditer(PAGE, text, re.MULTILINE)], dtype=np.int64)
    # A table of 256 entries turns bytes into tokens; 255 stands for a byte that is dropped (fewer than 255 values exist).
    table = np.full(256, 255, dtype=np.uint8)
    table[np.frombuffer(values, dtype=np.uint8)] = np.arange(len(values))
    records, begin = [], 0
    with progress(f"encoding {recipe.name}", total=len(symbols), unit="bytes") as advance:
        for split in recipe.splits:
            end = begin + recipe.counts.tokens[split]
            if split in wanted:
                md5 = hashlib.md5(text[begin:end], usedforsecurity=False).hexdigest()
                assert md5 == SPLITS_MD5[recipe.name][split], f"{recipe.name} {split} was cut at the wrong byte"
                with SplitWriter(folder=folder, name=split, vocabulary=tokenizer.size) as writer:
                    for here in range(begin, end, STRIDE):
                        stop = min(here + STRIDE, end)
                        inside = starts[(starts >= here) & (starts < stop)] - here
                        writer.append(_encoded(symbols[here:stop], table, page_starts=inside))
                        advance(stop - here)
                    records.append(writer.finish())
            begin = end
    rule = recipe.rule if newlines == "keep" else "bytes as the paper's code read them, newlines dropped; 90M / 5M / 5M"
    counts = recipe.counts if newlines == "keep" else recipe.alternatives["newlines dropped"]
    manifest = Manifest(
        name=recipe.name,
        rule=rule,
        unit=recipe.unit,
        documents=recipe.documents,
        origin={known.name: f"md5:{known.md5}"},
        splits=tuple(records),
        **encoded_by(tokenizer),
    )
    return manifest, tokenizer, counts


def _values(symbols: NDArray[np.uint8]) -> NDArray[np.int64]:
    # In strides: numpy counts in 64-bit integers, eight times the text.
    counts = np.zeros(256, dtype=np.int64)
    for begin in range(0, len(symbols), STRIDE):
        counts += np.bincount(symbols[begin : begin + STRIDE], minlength=256)
    return np.flatnonzero(counts)


def _encoded(symbols: NDArray[np.uint8], table: NDArray[np.uint8], *, page_starts: NDArray[np.int64]) -> Encoded:
    ids = table[symbols]
    kept = ids != 255
    return Encoded(
        tokens=ids[kept],
        # A page's position among the tokens is the number of bytes kept before it.
        document_starts=np.cumsum(kept)[page_starts] - 1 if len(page_starts) else page_starts,
        sentence_starts=page_starts[:0],
        bytes=len(symbols),
        characters=encoding.count_characters(symbols.tobytes()),
        words=None,
    )
