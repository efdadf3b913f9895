"""Reads a split so that every token after the first is scored exactly once, whatever the number of lanes.

    one lane      | s s | s s | s s | s s |        s scored, w warm-up: fed, not scored, . padding
    two lanes     | s s | s s | . . |              lane 0 has nothing before it
                  | w w | s s | s s |              lane 1 is fed what comes before its range

Ranges and warm-ups begin at whole segments, so that a token sees the same segment boundaries as with one lane.
"""

from collections.abc import Iterator

import numpy as np

from transformer_xl.data.feeding.lanes import Lanes, Segment, read_segment
from transformer_xl.data.store import Split
from transformer_xl.errors import DataError, InputError


class EvaluationStream:
    """`warm_up` tokens, rounded up to whole segments, are fed to a lane before its own range. `own`: the lanes that are read here, where others read the rest.

    For sentences the pair `<S>` -> `<S>` is no target, unless `score_boundaries`.
    """

    def __init__(
        self,
        split: Split,
        *,
        lanes: int,
        segment: int,
        warm_up: int,
        score_boundaries: bool = False,
        own: range | None = None,
    ) -> None:
        for name, value, least in (("lanes", lanes, 1), ("segment", segment, 1), ("warm_up", warm_up, 0)):
            if value < least:
                raise InputError(f"{name} is {value} and must be at least {least}")
        if len(split) < 2:
            raise DataError(f"{split.name} has {len(split)} tokens: there is nothing to predict")
        segment = min(segment, len(split) - 1)  # one segment holds it all: a longer one would hold only padding
        self.split = split
        self.segment = segment
        self.score_boundaries = score_boundaries
        segments = -(-(len(split) - 1) // segment)
        bounds = np.arange(lanes + 1) * segments // lanes
        first, end = bounds[:-1], bounds[1:]
        fed = np.maximum(first - -(-warm_up // segment), 0)
        fed[first == end] = end[first == end]  # a lane without a range of its own needs no warm-up
        chosen = slice(None) if own is None else slice(own.start, own.stop)
        self._fed_from = (fed * segment)[chosen]
        self._scored_from = (first * segment)[chosen]
        self._stops = np.minimum(end * segment, len(split) - 1)[chosen]
        self._steps = int((end - fed)[chosen].max(initial=0))

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Segment]:
        for step in range(self._steps):
            yield read_segment(
                self.split,
                starts=self._fed_from + step * self.segment,
                length=self.segment,
                stops=self._stops,
                scored_from=self._scored_from,
                score_boundaries=self.score_boundaries,
            )


class PaperEvaluation:
    """The paper's own rule: equal columns, the remainder dropped, every column starting cold. For comparing figures."""

    def __init__(self, split: Split, *, lanes: int = 10, segment: int, score_boundaries: bool = False) -> None:
        self._lanes = lanes
        self._segment = segment
        self._split = split
        self._score_boundaries = score_boundaries
        segments = self._columns().segments_per_epoch
        assert segments is not None, "lengths are fixed"
        self._steps = segments

    def _columns(self) -> Lanes:
        return Lanes(self._split, lanes=self._lanes, segment=self._segment, score_boundaries=self._score_boundaries)

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Segment]:
        columns = self._columns()
        for _ in range(self._steps):
            yield columns.next()
