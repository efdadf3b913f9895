"""How a model goes on learning while it reads, as a frozen value. Two ways, which go together: weights that move, and a cache of what was seen."""

from dataclasses import dataclass, replace
from typing import Literal

from transformer_xl.config.fields import at_most, fraction, literal, no_giant, not_negative, positive
from transformer_xl.errors import ConfigError

Adapt = Literal["gradient", "cache", "both"]
MOST_CACHED = 1 << 22
"""Positions of a cache with an end. One without end grows as the text does."""
LONGEST_SEGMENT = 1 << 16


@dataclass(frozen=True, kw_only=True)
class AdaptationConfig:
    rate: float = 0.0
    """How far weights move after each segment, once it was scored. 0: they stand still."""
    rule: Literal["sgd", "rms"] = "sgd"
    """sgd: along the gradient of the segment's mean loss. rms: each weight's gradient over the size it had on training text (Krause et al. 2018)."""
    decay: float = 0.0
    """The share of its way back to the trained value that each weight goes after each segment. Under rms: more where gradients are large."""
    learns: Literal["all", "layers", "attention", "feed_forward", "adapters"] = "all"
    """Which weights move. adapters: none of the model's own, but a thin product beside each matrix of its layers."""
    rank: int = 8
    """Of the adapters."""
    segment: int = 0
    """Tokens between two moves. 0: twice the segment that is evaluated with."""
    cache_lambda: float = 0.0
    """The cache's share of each prediction (Grave et al. 2016). 0: there is none."""
    cache_theta: float = 0.1
    """How much more the likeliest of the cached states counts than others. 0: all alike."""
    cache_size: int = 2000
    """The last positions that are kept. 0: all, of which those are looked at that were read after the same `cache_context` tokens."""
    cache_context: int = 4
    """For a cache without end."""

    @property
    def moves(self) -> bool:
        return self.rate > 0

    @property
    def caches(self) -> bool:
        return self.cache_lambda > 0

    def in_segments(self, read: int) -> "AdaptationConfig":
        """With its segment filled in, of a text that is evaluated in segments of `read`. Twice as many tokens move weights half as often: at twice the rate
        that gains as much, and takes two thirds of the time."""
        return replace(self, segment=self.segment or min(2 * read, LONGEST_SEGMENT))

    def without(self, part: Literal["gradient", "cache"]) -> "AdaptationConfig":
        return replace(self, rate=0.0) if part == "gradient" else replace(self, cache_lambda=0.0)

    def sentence(self) -> str:
        """What is learned, in words; empty where nothing is."""
        parts = []
        if self.moves:
            what = {"feed_forward": "feed-forward weights", "adapters": f"adapters of rank {self.rank}"}
            moved = what.get(self.learns, f"{self.learns} weights")
            parts.append(
                f"{moved} moved by {self.rule} after every {self.segment} tokens, rate {self.rate:g}, decay {self.decay:g}"
            )
        if self.caches:
            kept = (
                f"the last {self.cache_size:,} states"
                if self.cache_size
                else f"all states after the same {self.cache_context} tokens"
            )
            parts.append(f"a cache of {kept}, lambda {self.cache_lambda:g}, theta {self.cache_theta:g}")
        return "; ".join(parts)

    def __post_init__(self) -> None:
        no_giant(self, "adaptation")
        literal(self, "adaptation", "rule", "learns")
        not_negative(self, "adaptation", "rate", "segment", "cache_theta", "cache_size")
        positive(self, "adaptation", "rank", "cache_context")
        fraction(self, "adaptation", "decay", "cache_lambda")
        at_most(self, "adaptation", MOST_CACHED, "cache_size")
        at_most(self, "adaptation", LONGEST_SEGMENT, "segment")
        at_most(self, "adaptation", 64, "cache_context")
        if self.rate > 1e6 or self.cache_theta > 1e6:
            raise ConfigError(
                f"adaptation: rate {self.rate:g} and cache_theta {self.cache_theta:g} must be at most 1e6"
            )
