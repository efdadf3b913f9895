"""Whether a model has learned anything yet beyond how often each token occurs.

A rate that is too high for a text can leave a model at the entropy of single tokens for good, with a curve that looks like any other at first. So every
window of losses stands beside what the same tokens cost by their frequencies alone.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from transformer_xl.checkpoint import Window
from transformer_xl.config import NOT_A_TARGET, TrainingConfig
from transformer_xl.data.store import Split
from transformer_xl.errors import TransformerXLError

COUNTED = 1 << 22
"""Tokens that are counted, in pieces spread over the split."""
PIECES = 64
NEAR = 0.97
"""A loss above this share of the cost by frequencies has learned nothing else."""
FEWEST_STEPS, SHARE_OF_STEPS = 100, 0.05
"""After warm-up, so many steps or this share of all of them are waited for."""
LOWER, LONGER = 3, 2
"""What the rate is divided by, and the warm-up multiplied with, by whoever begins again."""


class Frequencies:
    """What each token costs, in nats, by how often it occurs in the split."""

    def __init__(self, split: Split, *, vocabulary: int) -> None:
        length = min(len(split), COUNTED) // PIECES + 1
        counts_V = np.zeros(vocabulary, dtype=np.int64)
        for begin in np.linspace(0, max(0, len(split) - length), PIECES, dtype=np.int64).tolist():
            counts_V += np.bincount(split.tokens[begin : begin + length], minlength=vocabulary)
        self._nats_V = np.log(counts_V.sum()) - np.log(np.maximum(counts_V, 1))  # none costs infinitely much

    def nats(self, targets: NDArray[np.int64]) -> float:
        """Summed over all that are targets."""
        return float(self._nats_V[targets[targets != NOT_A_TARGET]].sum())


class TrainingStuck(TransformerXLError):
    """Training has learned nothing, and was asked to end then."""


@dataclass(frozen=True)
class Stuck:
    step: int
    loss_nats: float
    frequency_nats: float
    training: TrainingConfig

    @property
    def early(self) -> bool:
        """Whether no more than a beginning is lost by beginning again. Who falls back later may have good checkpoints."""
        return self.step < 2 * _waited(self.training)

    def __str__(self) -> str:
        rate = lowered(self.training).learning_rate
        return (
            f"the loss is {self.loss_nats:.3f} nats after {self.step} steps, and knowing only how often each token occurs gives {self.frequency_nats:.3f}:"
            f" nothing else has been learned; begin again with training.learning_rate {rate:.2g} (it is {self.training.learning_rate:.2g}), with a longer"
            " training.warm_up, or with model.norm pre"
        )


def find_stuck(window: Window, training: TrainingConfig, *, step: int) -> Stuck | None:
    """By the window of losses that ends at `step`."""
    if step < _waited(training) or not window.tokens or window.nats <= NEAR * window.frequency_nats:
        return None
    return Stuck(step, window.nats / window.tokens, window.frequency_nats / window.tokens, training)


def _waited(training: TrainingConfig) -> int:
    return training.warm_up_steps + max(FEWEST_STEPS, int(SHARE_OF_STEPS * training.steps))


def lowered(training: TrainingConfig) -> TrainingConfig:
    """For another try."""
    before = training.warm_up_steps
    warm_up = max(before, min(max(1, before) * LONGER, training.steps // 4))
    return replace(training, learning_rate=training.learning_rate / LOWER, warm_up=warm_up, warm_up_share=0.0)
