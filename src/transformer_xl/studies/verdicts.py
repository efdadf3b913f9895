"""Whether what the paper claims appears in our figures: as an effect with its interval, which must exclude zero."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from transformer_xl.studies.intervals import Effect, Means, effect_of

Verdict = Literal["appears", "does not appear", "cannot tell"]
FEWEST_SEEDS = 3
"""With fewer, how far seeds lie apart is not known, and nothing can be told."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of a row: for each seed the mean loss of each block of the text, and what one nat is worth in the unit that is told."""

    blocks: Sequence[Sequence[float]]
    unit: str
    per_nat: float = 1 / math.log(2)

    def values(self, nats: Means) -> Means:
        found: Means = np.exp(np.minimum(nats, 700.0)) if self.unit == "perplexity_per_word" else nats * self.per_nat
        return found


Columns = Mapping[str, Mapping[str, Column]]
"""Row -> figure."""


@dataclass(frozen=True, kw_only=True)
class Told:
    claim: str
    verdict: Verdict
    effect: Effect | None = None

    def as_json(self) -> dict[str, Any]:
        effect = {} if self.effect is None else {"effect": self.effect.as_json()}
        return {"claim": self.claim, "here": self.verdict, **effect}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That one figure is lower than another; each is a row's name and a column's."""

    text: str
    better: tuple[str, str]
    worse: tuple[str, str]
    denied: bool = False
    """The claim is that it is not."""

    def told(self, columns: Columns) -> Told:
        better, worse = (columns[row].get(name) for row, name in (self.better, self.worse))
        if better is None or worse is None:
            return Told(claim=self.text, verdict="cannot tell")
        paired = self.better[0] == self.worse[0]
        found = effect_of(
            better.blocks,
            worse.blocks,
            lambda low, high: worse.values(high) - better.values(low),
            paired=paired,
        )
        seeds = min(len(better.blocks), len(worse.blocks))
        return Told(claim=self.text, effect=found, verdict=verdict_of(found, seeds=seeds, denied=self.denied))


def verdict_of(effect: Effect, *, seeds: int, denied: bool = False) -> Verdict:
    """What is claimed is a positive effect, or `denied`, that there is none: zero is then enough, if nothing above it lies within the interval."""
    if seeds < FEWEST_SEEDS:
        return "cannot tell"
    if denied:
        return "appears" if effect.high <= 0 else "does not appear" if effect.low > 0 else "cannot tell"
    return "appears" if effect.low > 0 else "does not appear" if effect.high < 0 else "cannot tell"


def compared(low: Sequence[float], high: Sequence[float]) -> Verdict:
    """Of figures that are no means over a text: whether every seed of `low` lies below every seed of `high`, the other way round, or neither."""
    if max(low) < min(high):
        return "appears"
    return "does not appear" if min(low) >= max(high) else "cannot tell"
