"""A text that is learned from while it is read, in pieces, so that the thread that does it can write for others in between. Knows no request.

adaptive   reads, tells, then learns: weights of its own, a cache of its own
still      reads the same text in the same pieces and never learns: what the tokens would have cost
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from transformer_xl.adaptation import AdaptiveReader, Statistics
from transformer_xl.config import AdaptationConfig
from transformer_xl.errors import CheckpointError
from transformer_xl.inference.reader import CHUNK
from transformer_xl.model import AnyModel

LESSON_TOKENS = 128
"""Of one piece, in whole segments; one segment where it is longer."""
LESSON_WEIGHT = 4
"""A token that is learned from takes about as long as so many that are read: forwards, and backwards."""
ADAPTIVE, STILL = "learning.safetensors", "still.safetensors"


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A value: who reads on forks it first."""

    adaptive: AdaptiveReader
    """Of one lane."""
    still: AdaptiveReader | None
    """Where both are compared."""

    @classmethod
    def begin(
        cls, model: AnyModel, how: AdaptationConfig, *, statistics: Statistics | None, compare: bool
    ) -> "Learner":
        adaptive = AdaptiveReader(model, how, statistics=statistics)
        still = AdaptiveReader(model, how.without("cache"), statistics=statistics) if compare else None
        return cls(adaptive=adaptive, still=still)

    @property
    def how(self) -> AdaptationConfig:
        return self.adaptive.how

    @property
    def read(self) -> int:
        return self.adaptive.lane(0).read

    @property
    def sizes(self) -> str:
        """The fingerprint of the sizes of gradients that it learns by; empty where it needs none."""
        return "" if self.adaptive.statistics is None else self.adaptive.statistics.fingerprint

    def fork(self) -> "Learner":
        return Learner(adaptive=self.adaptive.fork(), still=None if self.still is None else self.still.fork())

    # --- at rest, where anybody may have written it

    @property
    def files(self) -> tuple[str, ...]:
        return (ADAPTIVE,) if self.still is None else (ADAPTIVE, STILL)

    def save(self, folder: Path) -> None:
        self.adaptive.save(folder / ADAPTIVE)
        if self.still is not None:
            self.still.save(folder / STILL)

    @classmethod
    def restore(
        cls, model: AnyModel, folder: Path, how: AdaptationConfig, *, statistics: Statistics | None, compare: bool
    ) -> "Learner":
        adaptive, still = AdaptiveReader.restore(model, folder / ADAPTIVE, how, statistics=statistics, lanes=1), None
        if compare:
            still = AdaptiveReader.restore(model, folder / STILL, how.without("cache"), statistics=statistics, lanes=1)
        for reader in (adaptive, still):
            if reader is not None and (reader.lanes != 1 or reader.lane(0).read != adaptive.lane(0).read):
                raise CheckpointError(f"{folder}: its readers have read different texts, or several")
        return cls(adaptive=adaptive, still=still)


@dataclass(frozen=True, kw_only=True)
class Learned:
    learner: Learner
    """After the text."""
    loss_P: NDArray[np.float32]
    """In nats, before anything was learned from a token; NaN for the first of all."""
    static_P: NDArray[np.float32] | None
    """The same without learning, where both are compared."""


def learn(learner: Learner, tokens: Sequence[int], *, own: bool = False) -> Generator[int, None, Learned]:
    """Reads on with a fork; yields how many tokens it has just read. `own`: the model wrote them, and weights do not learn from them."""
    learner = learner.fork()
    loss_P = np.empty(len(tokens), dtype=np.float32)
    static_P = None if learner.still is None else np.empty_like(loss_P)
    device = learner.adaptive.model.vocabulary.bias_V.device
    for place in _pieces(learner, len(tokens)):
        row_1T = torch.tensor([tokens[place]], device=device)
        loss_P[place] = learner.adaptive.score(row_1T, own=own)[0].float().cpu().numpy()
        if learner.still is not None and static_P is not None:
            static_P[place] = learner.still.score(row_1T, own=True)[0].float().cpu().numpy()
        yield place.stop - place.start
    return Learned(learner=learner, loss_P=loss_P, static_P=static_P)


def _pieces(learner: Learner, tokens: int) -> Iterator[slice]:
    """Each ends where a segment does, so that none is read again; a segment is whole once the token after it is there."""
    start, first, step = 0, CHUNK, CHUNK
    if learner.how.moves:
        step = learner.how.segment * max(1, LESSON_TOKENS // learner.how.segment)
        first = step - (learner.read - 1) % step if learner.read else step + 1
    for end in (*range(first, tokens, step), tokens):
        yield slice(start, end)
        start = end
