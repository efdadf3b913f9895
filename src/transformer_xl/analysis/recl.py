"""Relative Effective Context Length (Appendix C): how much context a model makes use of, measured against the best of a group of models.

    l_i(c, t)    loss of model i on token t given the c tokens before it         what comes in
    b(c, t)      min over i of l_i(c, t): what the whole group can do with c     `Group.baseline`
    T            the top r of positions by b(c, t)                               `hardest`
    f_i(c, c')   mean over T of min(b(c, t), l_i(c', t))                         `relative_losses`
    g_i(c, c')   1 - exp f_i(c, c') / exp f_i(c, c)                              `relative_gains`
    RECL         the first c with g_i(c, c + step) below a threshold             `effective_lengths`

Numpy only: whoever has losses per token, from any model, can join a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_xl.errors import InputError

THRESHOLD = 0.01
"""The paper's: a step of context is worth it while it lowers the perplexity by a hundredth."""
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Losses of several models on the same tokens. Axes: I model, C context length, P position."""

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    """Context lengths, each a step longer than the one before."""
    loss_ICP: Array

    @property
    def step(self) -> int:
        return self.lengths[1] - self.lengths[0]

    @property
    def positions(self) -> int:
        return int(self.loss_ICP.shape[2])

    def baseline(self, place: int) -> Array:
        """b(c, t) of the context length at this place."""
        baseline_P: Array = self.loss_ICP[:, place].min(axis=0)
        return baseline_P

    def perplexities(self) -> Array:
        """Plain ones, over all positions: [I, C]."""
        return exp(self.loss_ICP.mean(axis=2))


@dataclass(frozen=True)
class EffectiveLength:
    length: int
    at_least: bool = False
    """The gain had not fallen below the threshold where the context lengths ended."""

    def __str__(self) -> str:
        return f">={self.length}" if self.at_least else str(self.length)


def make_group(losses: Mapping[str, Mapping[int, NDArray[Any]]], *, lengths: Sequence[int]) -> Group:
    """From each model's losses by context length, in corpus order; all must be of the same tokens."""
    if len(lengths) < 2:
        raise InputError(
            f"{len(lengths)} context length ({', '.join(map(str, lengths))}) leaves nothing to compare; give at least two"
        )
    if len({later - earlier for earlier, later in pairwise(lengths)}) > 1:
        raise InputError(f"context lengths {', '.join(map(str, lengths))} are not evenly spaced; use one step for all")
    if not losses:
        raise InputError("a group without models has no baseline; give at least one model")
    sizes: dict[str, int] = {}
    for name, by_length in losses.items():
        for length in lengths:
            sizes[f"{name} (context {length})"] = _checked(by_length, length, name)
    if len(set(sizes.values())) > 1:
        # The first that differs.
        (one, size), (other, other_size) = next((a, b) for a in sizes.items() for b in sizes.items() if a[1] != b[1])
        raise InputError(
            f"{one} has {size:,} positions and {other} has {other_size:,}; losses of a group must be of the same tokens"
        )
    loss_ICP = np.array([[by_length[length] for length in lengths] for by_length in losses.values()], dtype=np.float64)
    return Group(names=tuple(losses), lengths=tuple(lengths), loss_ICP=loss_ICP)


def hardest(baseline_P: Array, *, ratio: float) -> NDArray[np.intp]:
    """The top `ratio` of positions by baseline loss, at least one; of equal ones the earlier."""
    if not 0 < ratio <= 1:
        raise InputError(f"ratio: {ratio} is not a share of the positions; give one above 0 and up to 1")
    count = max(1, round(ratio * len(baseline_P)))
    return np.argsort(-baseline_P, kind="stable")[:count]


def relative_losses(group: Group, place: int, *, longer: Sequence[int], ratio: float) -> Array:
    """f_i(c, c') for the c at `place` among the lengths and the c' at the places `longer`: [I, C]."""
    baseline_P = group.baseline(place)
    hard = hardest(baseline_P, ratio=ratio)
    f_CI = [np.minimum(baseline_P[hard], group.loss_ICP[:, other, hard]).mean(axis=1) for other in longer]
    return np.stack(f_CI, axis=1)


def relative_gains(group: Group, *, ratio: float) -> Array:
    """g_i(c, c + step), [I, C-1]."""
    gains = []
    for place in range(len(group.lengths) - 1):
        f_IC = relative_losses(group, place, longer=(place, place + 1), ratio=ratio)
        # The same ratio, where perplexities themselves may be too large.
        gains.append(-np.expm1(f_IC[:, 1] - f_IC[:, 0]))
    return np.stack(gains, axis=1)


def perplexity_gains(group: Group, *, ratio: float) -> Array:
    """exp f_i(c, c) - exp f_i(c, c') for all pairs, [I, C, C]; NaN where c' is not longer than c. What the paper draws."""
    C = len(group.lengths)
    gain_ICC = np.full((len(group.names), C, C), np.nan)
    for place in range(C):
        perplexity_IC = exp(relative_losses(group, place, longer=range(place, C), ratio=ratio))
        gain_ICC[:, place, place + 1 :] = perplexity_IC[:, :1] - perplexity_IC[:, 1:]
    return gain_ICC


def effective_lengths(group: Group, *, ratio: float, threshold: float = THRESHOLD) -> dict[str, EffectiveLength]:
    """The RECL of each model of the group."""
    if not 0 < threshold < float("inf"):
        raise InputError(f"threshold: {threshold} would never stop or never start; give a gain above 0, such as 0.01")
    found = {}
    for name, gain_C in zip(group.names, relative_gains(group, ratio=ratio), strict=True):
        below = (length for length, gain in zip(group.lengths, gain_C, strict=False) if gain < threshold)
        first = next(below, None)
        found[name] = EffectiveLength(group.lengths[-1], at_least=True) if first is None else EffectiveLength(first)
    return found


def exp(values: Array) -> Array:
    """Perplexities; those beyond every float become the largest that is worth writing."""
    perplexity: Array = np.exp(np.minimum(values, 700.0))
    return perplexity


def _checked(by_length: Mapping[int, NDArray[Any]], length: int, name: str) -> int:
    """How many positions these losses have, once they are what they should be."""
    if length not in by_length:
        held = ", ".join(map(str, sorted(by_length))) or "none"
        raise InputError(f"{name} has no losses for context {length} (it has {held}); fit start, step and longest")
    array = by_length[length]
    if array.ndim != 1 or array.dtype.kind not in "fiu":
        raise InputError(
            f"{name} (context {length}) holds {array.dtype} {list(array.shape)}; give one loss in nats for each token, in order"
        )
    if not len(array):
        raise InputError(f"{name} (context {length}) holds no losses; give at least one token's")
    if not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise InputError(
            f"{name} (context {length}) holds {array[place]} at position {place}; leave tokens without a loss out of every array"
        )
    return len(array)
