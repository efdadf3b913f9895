"""Which token comes next in one lane: the settings, and a sampler with its own chance and its own past. Knows no model and no text."""

import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from transformer_xl import native
from transformer_xl.config.fields import not_negative
from transformer_xl.decoding.distribution import Adjustment, Lane, Question, at_share, best, draw, nucleus, shortened
from transformer_xl.errors import InputError

RECENT = 512
"""How many of the last tokens, prompt and output together, a repetition penalty looks at."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Applied in this order: repetition penalty, temperature, top-k, top-p, min-p; what is left is drawn from in proportion."""

    temperature: float = 1.0
    """Log-probabilities are divided by it. 0: always the likeliest token."""
    top_k: int = 40
    """Only the k likeliest. 0: all."""
    top_p: float = 1.0
    """Only the likeliest that together have this share of what top-k left; the one that crosses it stays."""
    min_p: float = 0.0
    """Only those at least this many times as likely as the likeliest. 0: all."""
    repetition_penalty: float = 1.0
    """The probability of a token among the last 512 is raised to this power, before anything else. 1: none is."""
    seed: int = 0

    def __post_init__(self) -> None:
        not_negative(self, "sampling", "temperature", "top_k", "seed")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError(f"sampling.top_p: {self.top_p} is no share; it must be above 0 and at most 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise InputError(f"sampling.min_p: {self.min_p} is no share; it must be from 0 to 1")
        if not self.repetition_penalty >= 1.0:
            raise InputError(
                f"sampling.repetition_penalty: {self.repetition_penalty} would reward repetition; it must be at least 1"
            )


class Sampler:
    """One lane's choices: they depend on its own seed and past alone, whatever other lanes do."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._chance = random.Random(sampling.seed)
        self._recent: deque[int] = deque()
        self._seen: Counter[int] = Counter()

    def saw(self, tokens: Iterable[int]) -> None:
        """Tokens that the lane has read: its prompt. What it draws itself, it remembers itself."""
        if self.sampling.repetition_penalty == 1.0:
            return
        for token in tokens:
            self._recent.append(token)
            self._seen[token] += 1
            if len(self._recent) > RECENT:
                oldest = self._recent.popleft()
                self._seen[oldest] -= 1
                if not self._seen[oldest]:
                    del self._seen[oldest]

    @property
    def plain(self) -> bool:
        """Whether its choices depend on nothing but the distribution and its chance: then the kernels can draw for it."""
        return self.sampling.repetition_penalty == 1.0

    def choice(self) -> native.Choice:
        """How the kernels are to draw; `chance` gives each draw its share."""
        sampling = self.sampling
        return native.Choice(
            temperature=sampling.temperature, top_p=sampling.top_p, min_p=sampling.min_p, top_k=sampling.top_k
        )

    def share(self) -> float:
        """The chance of the next draw. The likeliest token needs none."""
        return self._chance.random() if self.sampling.temperature else 0.0

    def pick(self, lane: Lane) -> Question[int]:
        token = yield from self._choose(lane)
        self.saw([token])
        return token

    def _choose(self, lane: Lane) -> Question[int]:
        sampling = self.sampling
        how = Adjustment(
            temperature=sampling.temperature or 1.0,
            penalty=sampling.repetition_penalty,
            seen=np.array(sorted(self._seen), dtype=np.int64),
        )
        if sampling.temperature == 0.0:
            return int((yield from best(lane, 1, how=how)).token_K[0])
        share = self.share()
        if sampling.top_k:
            words = shortened((yield from best(lane, sampling.top_k, how=how)), p=sampling.top_p, min_p=sampling.min_p)
        elif sampling.top_p < 1.0 or sampling.min_p:
            words = yield from nucleus(lane, p=sampling.top_p, min_p=sampling.min_p, how=how)
        else:
            return (yield from at_share(lane, share, how=how))
        return draw(words, share)
