"""The One Billion Word rule: each lane reads its own stream of shuffled sentences. Same interface as Lanes.

Every epoch the sentences are shuffled anew and dealt like cards; a lane reads its own one after the other, memory running
on. Each sentence brings its own `<S>` at both ends; of the pair where two meet, the second is no target unless asked for.

    lane 0   <S> a b <S> <S> c <S>     lanes have sentences of different lengths: one that has read all of its own
    lane 1   <S> d <S> <S> e <S> .     is padded until the last has, so that an epoch scores each word exactly once
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_xl.config import NOT_A_TARGET
from transformer_xl.data.feeding.lanes import Segment, SegmentLengths, check_offset, own_lanes, restored
from transformer_xl.data.store import Split
from transformer_xl.errors import DataError, InputError


@dataclass(frozen=True, kw_only=True)
class _Hands:
    """The sentences of the own lanes in one epoch: where in the split each begins and ends."""

    epoch_length: int
    """Of the lane with the most tokens, whoever has it."""
    starts: list[NDArray[np.int64]]
    ends: list[NDArray[np.int64]]


class SentenceLanes:
    """`lanes` counts all ranks together. With `score_boundaries` the pair `<S>` -> `<S>` is a target, as in some other figures."""

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
    ) -> None:
        if split.sentence_mark is None:
            raise DataError(f"{split.name} is not made of sentences; read it with Lanes")
        if len(split.sentence_starts) < lanes:
            raise DataError(
                f"{split.name} has {len(split.sentence_starts):,} sentences, too few for {lanes} lanes; use fewer lanes"
            )
        if context < 0:
            raise InputError(f"context is {context} and must not be negative")
        self.split = split
        self.context = context
        self.epoch = 0
        self._own = own_lanes(lanes=lanes, rank=rank, world=world)
        self._lane_count = lanes
        self._seed = seed
        self._score_boundaries = score_boundaries
        self._lengths = SegmentLengths(segment=segment, variable=variable, seed=seed)
        self._offset = 0
        self._identity = {
            "kind": "sentences",
            "tokens": len(split),
            "lanes": lanes,
            "segment": segment,
            "variable": variable,
            "seed": seed,
        }
        self._take(self._dealt(epoch=0))

    @property
    def at_start(self) -> bool:
        return self._offset == 0

    @property
    def segments_per_epoch(self) -> int | None:
        """Of this epoch: the next deals the sentences differently. None when lengths vary."""
        return None if self._lengths.variable else -(-(self._epoch_length - 1) // self._lengths.segment)

    def next(self) -> Segment:
        last = self._epoch_length - 1
        length = min(self._lengths.draw(), last - self._offset)
        context = min(self.context, self._offset)
        positions = np.stack([self._positions(index, context + length + 1) for index in range(len(self._own))])
        real = positions >= 0
        stream = np.where(real, self.split.tokens[np.where(real, positions, 0)], 0).astype(np.int64)
        tokens = np.ascontiguousarray(stream[:, :-1])
        targets = np.where(real, stream, NOT_A_TARGET)[:, context + 1 :]
        if not self._score_boundaries:
            mark = self.split.sentence_mark
            targets[(targets == mark) & (tokens[:, context:] == mark)] = NOT_A_TARGET
        self._advance(length)
        return Segment(
            tokens=tokens,
            targets=np.ascontiguousarray(targets),
            positions=np.where(targets == NOT_A_TARGET, NOT_A_TARGET, positions[:, context + 1 :]),
            document_starts=np.zeros(tokens.shape, dtype=bool),
        )

    def state(self) -> dict[str, Any]:
        return {**self._identity, "epoch": self.epoch, "offset": self._offset, "generator": self._lengths.state()}

    def restore(self, state: dict[str, Any]) -> None:
        state = restored(state, identity=self._identity)
        same = self.epoch == state["epoch"]  # dealing thirty million sentences takes seconds
        hands = None if same else self._dealt(epoch=state["epoch"])
        check_offset(state, last=(self._epoch_length if hands is None else hands.epoch_length) - 1)
        if hands is not None:
            self.epoch = state["epoch"]
            self._take(hands)
        self._offset = state["offset"]
        self._lengths.restore(state["generator"])
        for index in range(len(self._own)):
            self._seek(index, self._offset - min(self.context, self._offset))

    def _dealt(self, *, epoch: int) -> "_Hands":
        """All sentences, shuffled the same way on every rank; of these the cards of the own lanes."""
        starts = self.split.sentence_starts
        ends = np.append(starts[1:], len(self.split))
        order = np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(len(starts))
        hands = [order[lane :: self._lane_count] for lane in range(self._lane_count)]
        return _Hands(
            epoch_length=max(int((ends[hand] - starts[hand]).sum()) for hand in hands),
            starts=[starts[hands[lane]] for lane in self._own],
            ends=[ends[hands[lane]] for lane in self._own],
        )

    def _take(self, hands: "_Hands") -> None:
        self._epoch_length, self._starts, self._ends = hands.epoch_length, hands.starts, hands.ends
        self._offset = 0
        # Where each lane's next reading begins (`context` tokens back): which of its sentences, and how far into it.
        self._sentence = [0] * len(self._own)
        self._inside = [0] * len(self._own)

    def _positions(self, index: int, length: int) -> NDArray[np.int64]:
        """Where in the split the lane's next `length` tokens stand; -1 once it has read all of its sentences."""
        starts, ends = self._starts[index], self._ends[index]
        sentence, inside = self._sentence[index], self._inside[index]
        positions = np.full(length, NOT_A_TARGET, dtype=np.int64)
        filled = 0
        while filled < length and sentence < len(starts):
            begin = int(starts[sentence]) + inside
            count = min(int(ends[sentence]) - begin, length - filled)
            positions[filled : filled + count] = np.arange(begin, begin + count)
            filled += count
            sentence, inside = sentence + 1, 0
        return positions

    def _advance(self, length: int) -> None:
        read_from = self._offset - min(self.context, self._offset)
        self._offset += length
        if self._offset == self._epoch_length - 1:
            self.epoch += 1
            self._take(self._dealt(epoch=self.epoch))
            return
        passed = self._offset - min(self.context, self._offset) - read_from
        for index in range(len(self._own)):
            left = self._inside[index] + passed
            sentence = self._sentence[index]
            starts, ends = self._starts[index], self._ends[index]
            while sentence < len(starts) and left >= (size := int(ends[sentence] - starts[sentence])):
                left -= size
                sentence += 1
            self._sentence[index], self._inside[index] = sentence, left

    def _seek(self, index: int, offset: int) -> None:
        totals = np.cumsum(self._ends[index] - self._starts[index])
        sentence = int(np.searchsorted(totals, offset, side="right"))
        self._sentence[index] = sentence
        self._inside[index] = offset - (int(totals[sentence - 1]) if sentence else 0)
