"""Cuts a split into lanes and reads them segment by segment, for training. Knows no model.

    split   0 1 2 3 4 5 6 7 8 9 10 11 12       B = 3 lanes of 4, the remainder (12) is dropped
    lane 0  0 1 2 3      segment of 2:  0 1 -> 1 2,  then 2 -> 3
    lane 1  4 5 6 7                     4 5 -> 5 6,       6 -> 7
    lane 2  8 9 10 11                   8 9 -> 9 10,     10 -> 11

The first token of a lane is never a target. After its last segment every lane begins again at its start: a new epoch,
where memory is dropped. A position is the same few numbers for all lanes and ranks, so a run can go on with another
number of ranks.

Who reads less than an epoch sees only the beginnings of the lanes. With `stretch` the lanes go through places spread over all of the split, so many
segments at each, where memory is dropped too; every epoch has another order and other borders, and no token is fed twice in one.

    split   . 0 0 1 1 2 2 3 3 4 4 5 5 .        stretches of 2 in the order 4 0 5 2 3 1, B = 2 lanes:
    lane 0  4 4 | 5 5 | 3 3                    the first token after a stretch is its last target
    lane 1  0 0 | 2 2 | 1 1
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_xl.config import NOT_A_TARGET
from transformer_xl.data.store import Split
from transformer_xl.errors import DataError, InputError

SHORTEST_VARIABLE = 5
LONGEST_VARIABLE_BEYOND = 15
VARIABLE_DEVIATION = 5.0
HALF_LENGTH_SHARE = 0.05
MOST_EPOCHS = 1 << 53


@dataclass(frozen=True)
class Segment:
    """What a model is fed, by all the ways of reading a split: B lanes, C context tokens fed again without being scored (normally none), T targets."""

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
    positions = np.where(scored, inputs[:, context:] + 1, NOT_A_TARGET)
    # Widened first: the store's integers have no room for -1.
    targets = np.where(scored, split.tokens[np.where(scored, positions, 0)].astype(np.int64), NOT_A_TARGET)
    if split.sentence_mark is not None and not score_boundaries:
        unscored = (targets == split.sentence_mark) & (tokens[:, context:] == split.sentence_mark)
        targets[unscored] = positions[unscored] = NOT_A_TARGET
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


class SegmentLengths:
    """Fixed, or drawn as the paper's code draws them: mostly near `segment`, now and then near half of it."""

    def __init__(self, *, segment: int, variable: bool, seed: int) -> None:
        if segment < 1:
            raise InputError(f"segment is {segment} and must be at least 1")
        self.segment = segment
        self.variable = variable
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def draw(self) -> int:
        if not self.variable:
            return self.segment
        centre = self.segment / 2 if self._generator.random() < HALF_LENGTH_SHARE else self.segment
        length = int(self._generator.normal(centre, VARIABLE_DEVIATION))
        return min(max(length, SHORTEST_VARIABLE), self.segment + LONGEST_VARIABLE_BEYOND)

    def state(self) -> dict[str, Any]:
        return dict(self._generator.bit_generator.state)

    def restore(self, state: dict[str, Any]) -> None:
        """A state that `check` has found possible."""
        self._generator.bit_generator.state = state

    @staticmethod
    def check(state: object) -> None:
        """Whether PCG64 can be in this state: NumPy itself takes some that it cannot, and refuses others with errors of many kinds."""
        match state:
            case {
                "bit_generator": "PCG64",
                "state": {"state": inner, "inc": inc, **others},
                "has_uint32": has_half,
                "uinteger": half,
                **rest,
            } if not others and not rest:
                possible = _below(inner, 1 << 128) and _below(inc, 1 << 128) and inc % 2 == 1
                if possible and _below(has_half, 2) and _below(half, 1 << 32):
                    return
        raise DataError("the saved position's generator is in a state that none can be in; use an older checkpoint")


def _below(value: object, end: int) -> bool:
    return type(value) is int and 0 <= value < end


def own_lanes(*, lanes: int, rank: int, world: int) -> range:
    """The consecutive lanes of one rank."""
    if lanes < 1:
        raise InputError(f"lanes is {lanes} and must be at least 1")
    if not 0 <= rank < world or lanes % world:
        raise InputError(f"{lanes} lanes cannot be dealt to rank {rank} of {world}: make lanes a multiple of the ranks")
    share = lanes // world
    return range(rank * share, (rank + 1) * share)


def restored(state: dict[str, Any], *, identity: dict[str, Any]) -> dict[str, Any]:
    """The state, if it was saved by a reader of the same split in the same lanes."""
    for name, mine in identity.items():
        if state.get(name) != mine:
            raise DataError(f"the saved position is for {name} {state.get(name)}, this reader has {name} {mine}")
    for name in state.keys() ^ {*identity, "epoch", "offset", "generator"}:
        raise DataError(f"the saved position {'has a field' if name in state else 'lacks the field'} {name}")
    if not _below(state["epoch"], MOST_EPOCHS):
        raise DataError(f"the saved position is in epoch {state['epoch']}, which cannot be")
    SegmentLengths.check(state["generator"])
    return state


def check_offset(state: dict[str, Any], *, last: int) -> None:
    """`last` is where a lane's text has nothing left to predict: an epoch ends there, so that no reader stands at it."""
    if not _below(state["offset"], last):
        raise DataError(f"the saved position has offset {state['offset']}, which is not within its lanes of {last}")


class Lanes:
    """`lanes` counts all ranks together; `context` tokens of the lane are fed again in front of each segment.

    For sentences the pair `<S>` -> `<S>` is no target, unless `score_boundaries`. A split with no stretch of `stretch` segments for each lane is read
    straight on.
    """

    def __init__(
        self,
        split: Split,
        *,
        lanes: int,
        segment: int,
        context: int = 0,
        rank: int = 0,
        world: int = 1,
        variable: bool = False,
        seed: int = 0,
        score_boundaries: bool = False,
        stretch: int = 0,
    ) -> None:
        own = own_lanes(lanes=lanes, rank=rank, world=world)
        self.split = split
        self.lane_length = len(split) // lanes
        if self.lane_length < 2:
            raise DataError(f"{split.name} has {len(split):,} tokens, too few for {lanes} lanes; use fewer lanes")
        if context < 0:
            raise InputError(f"context is {context} and must not be negative")
        self.context = context
        self.score_boundaries = score_boundaries
        self.epoch = 0
        self._offset = 0
        self._lengths = SegmentLengths(segment=segment, variable=variable, seed=seed)
        self._seed = seed
        self._own, self._lanes = np.arange(own.start, own.stop), lanes
        # Without the last stretch: so many fit wherever in the first one an epoch begins.
        self._stretches = len(split) // (stretch * segment) - 1 if stretch else 0
        straight = self._stretches < lanes
        self._span = self.lane_length - 1 if straight else stretch * segment
        """Targets of a lane from one place to the next."""
        self._rounds = 1 if straight else self._stretches // lanes
        self._starts = np.arange(lanes) * self.lane_length if straight else self._draw_starts()
        self._identity = {
            "kind": "lanes",
            "tokens": len(split),
            "lanes": lanes,
            "segment": segment,
            "variable": variable,
            **({"stretch": stretch, "seed": seed} if stretch else {}),
        }

    @property
    def at_start(self) -> bool:
        """Whether what comes next does not continue what came before."""
        return self._offset % self._span == 0

    @property
    def segments_per_epoch(self) -> int | None:
        """None when lengths vary: then no two epochs need have as many."""
        return None if self._lengths.variable else self._rounds * -(-self._span // self._lengths.segment)

    def next(self) -> Segment:
        places, within = divmod(self._offset, self._span)
        length = min(self._lengths.draw(), self._span - within)
        segment = read_segment(
            self.split,
            starts=self._starts[places * self._lanes + self._own] + within,
            length=length,
            context=min(self.context, within),
            score_boundaries=self.score_boundaries,
        )
        self._offset += length
        if self._offset == self._rounds * self._span:
            self._offset = 0
            self.epoch += 1
            if self._stretches >= self._lanes:
                self._starts = self._draw_starts()
        return segment

    def _draw_starts(self) -> NDArray[np.int64]:
        """Where this epoch's stretches begin, in the order of reading, by seed and epoch alone."""
        generator = np.random.Generator(np.random.PCG64([self._seed, self.epoch]))
        shift = int(generator.integers(self._span))
        return generator.permutation(self._stretches) * self._span + shift

    def state(self) -> dict[str, Any]:
        return {**self._identity, "epoch": self.epoch, "offset": self._offset, "generator": self._lengths.state()}

    def restore(self, state: dict[str, Any]) -> None:
        state = restored(state, identity=self._identity)
        check_offset(state, last=self._rounds * self._span)
        self.epoch, self._offset = state["epoch"], state["offset"]
        if self._stretches >= self._lanes:
            self._starts = self._draw_starts()
        self._lengths.restore(state["generator"])
