"""What a model is fed: a segment of every lane at once. Shared by all the ways of reading a split."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_xl.data.store import Split

NO_TARGET = -1


@dataclass(frozen=True)
class Segment:
    """B lanes, C context tokens fed again without being scored (normally none), T targets."""

    tokens: NDArray[np.int64]
    """[B, C+T]"""
    targets: NDArray[np.int64]
    """[B, T]: the token after each of the last T; -1 where there is nothing to predict."""
    positions: NDArray[np.int64]
    """[B, T]: where in the split each target stands; -1 where there is none."""
    document_starts: NDArray[np.bool_]
    """[B, C+T]: this token begins a document."""


def read_segment(
    split: Split,
    *,
    starts: NDArray[np.int64],
    length: int,
    context: int = 0,
    stops: NDArray[np.int64] | None = None,
    scored_from: NDArray[np.int64] | None = None,
    score_boundaries: bool = False,
) -> Segment:
    """The tokens at `starts` and the `length - 1` after them, each with the one after it as target.

    A lane stops at its entry of `stops` (no token from there on is fed, the one there may still be a target) and is padded
    with token 0; inputs before `scored_from` have no target.
    """
    B = len(starts)
    inputs = starts[:, None] + np.arange(-context, length)
    real = np.ones_like(inputs, dtype=bool) if stops is None else inputs < stops[:, None]
    tokens = np.where(real, split.tokens[np.where(real, inputs, 0)], 0).astype(np.int64)
    scored = (
        real[:, context:] if scored_from is None else real[:, context:] & (inputs[:, context:] >= scored_from[:, None])
    )
    positions = np.where(scored, inputs[:, context:] + 1, NO_TARGET)
    # Widened first: the store's integers have no room for -1.
    targets = np.where(scored, split.tokens[np.where(scored, positions, 0)].astype(np.int64), NO_TARGET)
    if split.sentence_mark is not None and not score_boundaries:
        unscored = (targets == split.sentence_mark) & (tokens[:, context:] == split.sentence_mark)
        targets[unscored] = positions[unscored] = NO_TARGET
    document_starts = np.zeros((B, context + length), dtype=bool)
    for lane, first in enumerate(inputs[:, 0].tolist()):
        document_starts[lane] = _marks(split, first, context + length) & real[lane]
    return Segment(
        tokens=np.ascontiguousarray(tokens),
        targets=np.ascontiguousarray(targets),
        positions=np.ascontiguousarray(positions),
        document_starts=document_starts,
    )


def _marks(split: Split, first: int, length: int) -> NDArray[Any]:
    begin, end = np.searchsorted(split.document_starts, (first, first + length))
    marks = np.zeros(length, dtype=bool)
    marks[split.document_starts[begin:end] - first] = True
    return marks
