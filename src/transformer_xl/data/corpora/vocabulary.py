"""Which words have numbers, and in which order. Knows counts and vocabulary files, no text."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformer_xl.data.corpora.sources import Source
from transformer_xl.data.text.tokenizers import decode_utf8
from transformer_xl.errors import DataError

PAD = re.compile(r"madeupword\d+$")
"""Some published lists are padded with such words, which occur nowhere."""
LARGEST_FILE = 256 << 20
COUNT = re.compile(r"[0-9]{1,18}")


def by_falling_frequency(
    counts: Mapping[str, int], *, first: Sequence[str] = (), min_count: int = 1, size: int | None = None
) -> list[str]:
    """`first`, then the words by how often they occur; equal ones stay in the order in which they were counted."""
    ranked = sorted(counts, key=lambda word: -counts[word])
    words = [*first, *(word for word in ranked if word not in first and counts[word] >= min_count)]
    return words if size is None else words[: max(size, len(first))]


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    words: list[str]
    counts: dict[str, int] | None
    """None where the file holds words alone."""


def read_vocabulary(path: Path, *, specials: Sequence[str]) -> Vocabulary:
    """A text file, plain or compressed: a word a line, with or without its count. `specials` it lacks come first."""
    source = Source(path=path, most=LARGEST_FILE)
    rows = [line.split() for line in decode_utf8(source.read(), name=source.name).split("\n")]
    rows = [row for row in rows if row and not PAD.match(row[0])]
    wide = next((row for row in rows if len(row) > 2 or (len(row) == 2 and not COUNT.fullmatch(row[1]))), None)
    if not rows or wide is not None:
        what = f"a line {' '.join(wide)[:40]!r}" if wide else "no words"
        raise DataError(f"{path} is no vocabulary: it has {what} where a line is a word, or a word and its count")
    words = [row[0] for row in rows]
    if len(set(words)) != len(words):
        twice = Counter(words).most_common(1)[0][0]
        raise DataError(f"{path} is no vocabulary: it has {twice!r} more than once")
    missing = [special for special in specials if special not in set(words)]
    counts = {row[0]: int(row[1]) for row in rows} if all(len(row) == 2 for row in rows) else None
    return Vocabulary(words=[*missing, *words], counts=counts)
