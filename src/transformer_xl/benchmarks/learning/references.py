"""Figures that need no training, to read the others by: what single bytes say, what counting does, what a compressor does."""

import lzma
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """What xz -9 adds to compressed train when test follows it."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def references_of(train: Bytes, test: Bytes) -> References:
    return References(single_bytes=entropy(test), ngram=_ngram(train, test), xz=_xz(train, test))


def entropy(text: Bytes) -> float:
    counts = np.bincount(text, minlength=256)
    shares = counts[counts > 0] / len(text)
    return float(-(shares * np.log2(shares)).sum())


def is_stuck(bits: float, *, single_bytes: float) -> bool:
    return not math.isfinite(bits) or bits >= STUCK_SHARE * single_bytes


def _ngram(train: Bytes, test: Bytes) -> float:
    return witten_bell_bits(train, test, order=ORDER, vocabulary=256)


def _xz(train: Bytes, test: Bytes) -> float:
    alone, both = (len(lzma.compress(text.tobytes(), preset=9)) for text in (train, np.concatenate([train, test])))
    return 8 * (both - alone) / len(test)
