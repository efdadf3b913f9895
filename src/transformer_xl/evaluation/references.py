"""Figures that need no training, to read the others by: what single bytes say, what counting does, what a compressor does."""

import lzma
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_xl.data.store import Store
from transformer_xl.evaluation.ngram import witten_bell_bits

ORDER = 5
"""Of the n-grams."""
STUCK_SHARE = 0.97
"""Of the entropy of single bytes: who has not come below it has learned nothing but how often each byte occurs."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class References:
    """Bits per byte of the test text."""

    single_bytes: float
    """Its entropy if every byte stood alone."""
    ngram: float
    """Witten-Bell n-grams counted on the whole of train."""
    xz: float
    """What xz -9 adds to compressed train when test follows it: it may copy from all of train."""
    xz_alone: float
    """What xz -9 makes of test by itself."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def text_of(store: Store, split: str, *, first: int | None = None, last: int | None = None) -> Bytes:
    """The bytes at the beginning or at the end of a split, whatever its tokens are."""
    tokens = store.split(split).tokens
    some = tokens[:first] if last is None else tokens[-last:]
    data = np.frombuffer(store.tokenizer.decode_bytes(some), dtype=np.uint8)
    return data[:first] if last is None else data[-last:]


def judged_by(store: Store, split: str, most: int) -> dict[str, int]:
    """How many of the first tokens make up so many bytes, and how many bytes those after the first stand for."""
    decode = store.tokenizer.decode_bytes
    first = store.split(split).tokens[:most]
    length_V = np.array([len(decode([token])) for token in range(store.manifest.vocabulary_size)])
    tokens = max(2, int(np.searchsorted(np.cumsum(length_V[first]), most, side="right")))
    # Decoded together: between two words there is a space that neither has.
    return {"tokens": tokens, "bytes": len(decode(first[:tokens])) - len(decode(first[:1]))}


def references_of(train: Bytes, test: Bytes) -> References:
    alone, before, both = (_xz_bytes(text) for text in (test, train, np.concatenate([train, test])))
    return References(
        single_bytes=entropy(test),
        ngram=witten_bell_bits(train, test, order=ORDER, vocabulary=256),
        xz=8 * (both - before) / len(test),
        xz_alone=8 * alone / len(test),
    )


def entropy(text: Bytes) -> float:
    counts = np.bincount(text, minlength=256)
    shares = counts[counts > 0] / len(text)
    return float((shares * np.log2(1 / shares)).sum())


def is_stuck(bits: float, *, single_bytes: float) -> bool:
    return not math.isfinite(bits) or bits >= STUCK_SHARE * single_bytes


def _xz_bytes(text: Bytes) -> int:
    return len(lzma.compress(text.tobytes(), preset=9))
