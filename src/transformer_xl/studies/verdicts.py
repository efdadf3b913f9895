"""Whether an ordering that the paper claims appears in our figures, computed from every seed's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["appears", "does not appear", "within the spread of seeds"]
Columns = Mapping[str, Mapping[str, Sequence[float]]]
"""Row -> column -> one value a seed."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """That one value is lower than another; each is a row's name and a column's."""

    text: str
    lower: tuple[str, str]
    higher: tuple[str, str]
    or_equal: bool = False

    def verdict(self, columns: Columns) -> Verdict:
        low, high = columns[self.lower[0]][self.lower[1]], columns[self.higher[0]][self.higher[1]]
        return compared(low, high, or_equal=self.or_equal)


def compared(low: Sequence[float], high: Sequence[float], *, or_equal: bool = False) -> Verdict:
    """Whether every seed of `low` lies below every seed of `high`, the other way round, or neither."""
    if max(low) < min(high) or (or_equal and max(low) <= min(high)):
        return "appears"
    if min(low) > max(high) or (not or_equal and min(low) >= max(high)):
        return "does not appear"
    return "within the spread of seeds"
