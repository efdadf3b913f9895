"""How sure an effect is: an interval over seeds and over places of the text, by drawing both again (bootstrap).

losses of a row   one mean a seed and block of text: the blocks of every row are the same places of the same text
a draw            so many seeds with replacement, so many blocks with replacement; the effect of their means
the interval      what 95 of 100 draws lie within
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCKS = 50
DRAWS = 4_000
SHARE = 0.95

Means = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Effect:
    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        return dict(vars(self))

    def shown(self, digits: int) -> str:
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def block_means(losses: NDArray[Any]) -> list[float]:
    """Of each of the blocks, in order; what was not scored is in none."""
    scored = losses[~np.isnan(losses)].astype(np.float64)
    return [float(part.mean()) for part in np.array_split(scored, min(BLOCKS, len(scored)))]


def effect_of(
    first: Sequence[Sequence[float]],
    second: Sequence[Sequence[float]],
    effect: Callable[[Means, Means], Means],
    *,
    paired: bool,
) -> Effect:
    """`effect` of the mean losses of two rows, each of them seeds of blocks. `paired`: a seed of one is the same model as that seed of the other."""
    one_SK, two_SK = np.array(first, dtype=np.float64), np.array(second, dtype=np.float64)
    random = np.random.default_rng(1)
    blocks_NK = random.integers(0, one_SK.shape[1], size=(DRAWS, one_SK.shape[1]))
    seeds_NS = random.integers(0, len(one_SK), size=(DRAWS, len(one_SK)))
    others_NS = seeds_NS if paired else random.integers(0, len(two_SK), size=(DRAWS, len(two_SK)))
    drawn_N = effect(_drawn(one_SK, seeds_NS, blocks_NK), _drawn(two_SK, others_NS, blocks_NK))
    value = effect(one_SK.mean(keepdims=True)[0], two_SK.mean(keepdims=True)[0])
    return interval_of(drawn_N, value=float(value[0]))


def interval_of(drawn_N: Means, *, value: float) -> Effect:
    low, high = np.quantile(drawn_N, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return Effect(value=value, low=float(low), high=float(high))


def _drawn(mean_SK: Means, seeds_NS: NDArray[np.int64], blocks_NK: NDArray[np.int64]) -> Means:
    """One mean a draw: over all pairs of a drawn seed and a drawn block."""
    by_block_NK = np.stack([mean_SK[seeds_S].mean(axis=0) for seeds_S in seeds_NS])
    mean_N: Means = np.take_along_axis(by_block_NK, blocks_NK, axis=1).mean(axis=1)
    return mean_N
