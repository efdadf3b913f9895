"""The likeliest continuation instead of a drawn one: the best few are carried on side by side, and the engine's lanes follow them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from transformer_xl.decoding.distribution import Words, best
from transformer_xl.decoding.lanes import Lanes
from transformer_xl.decoding.text import TextStream
from transformer_xl.decoding.writing import evaluating, read_prompts
from transformer_xl.errors import InputError, shown
from transformer_xl.inference.weights import WeightKind
from transformer_xl.model import AnyModel

MOST_BEAMS = 1024
"""Every step compares each one's likeliest continuations, as many again."""


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A continuation: the one before it and a token more."""

    forgets_after: ClassVar[None] = None
    parent: "Hypothesis | None" = None
    token: int = -1
    length: int = 0
    log_probability: float = 0.0
    """Of all its tokens, in nats."""
    text: TextStream | None = None
    """Where its text stands; None where there are no stop strings to look for."""

    @property
    def score(self) -> float:
        """Log-probability per token, in nats: a text that stopped early is not better for being short."""
        return self.log_probability / self.length

    @property
    def stopped(self) -> bool:
        return self.text is not None and self.text.stopped

    @property
    def tokens(self) -> list[int]:
        backwards, here = [], self
        while here.parent is not None:
            backwards.append(here.token)
            here = here.parent
        return backwards[::-1]

    def grown(self, token: int, log_probability: float) -> "Hypothesis":
        text = None if self.text is None else self.text.fork()
        if text is not None:
            text.push(token)
        total = self.log_probability + log_probability
        return Hypothesis(parent=self, token=token, length=self.length + 1, log_probability=total, text=text)


def beam_search(
    model: AnyModel,
    prompt: Sequence[int],
    *,
    tokens: int,
    beams: int,
    text: TextStream | None = None,
    weights: WeightKind = "exact",
) -> list[Hypothesis]:
    """At most `beams` continuations of at most `tokens` tokens, by falling score.

    At each step every live one is continued by its `beams` likeliest tokens, and the `beams` likeliest of all these live on. One whose `text`
    reaches a stop string is finished and gives its place up. Over when no live one can still rise above `beams` finished ones.
    """
    if beams < 1 or tokens < 1:
        raise InputError(f"{shown(beams)} beams of {shown(tokens)} tokens find nothing; ask for at least 1 of each")
    if beams > MOST_BEAMS:
        raise InputError(f"{shown(beams)} beams are too many to carry on side by side; ask for at most {MOST_BEAMS:,}")
    with evaluating(model):
        live, finished = [Hypothesis(text=text)], list[Hypothesis]()
        lanes: Lanes[Any] = Lanes(read_prompts(model, [prompt], weights=weights), live)
        for _ in range(tokens):
            words = lanes.ask([lambda lane: best(lane, beams)] * len(live))
            grown = _grown(live, words, beams=beams)
            finished += [hypothesis for _, hypothesis in grown if hypothesis.stopped]
            places = [place for place, hypothesis in grown if not hypothesis.stopped]
            live = [hypothesis for _, hypothesis in grown if not hypothesis.stopped]
            if not live or _decided(finished, live[0], tokens=tokens, beams=beams):
                break
            lanes.follow(places, live, [hypothesis.token for hypothesis in live])
    return sorted(finished + live, key=lambda hypothesis: -hypothesis.score)[:beams]


def _grown(live: list[Hypothesis], continuations: list[Words], *, beams: int) -> list[tuple[int, Hypothesis]]:
    """The likeliest continuations of all, falling, each with the lane it comes from."""
    possible = [
        (hypothesis.log_probability + score, lane, token, score)
        for lane, (hypothesis, words) in enumerate(zip(live, continuations, strict=True))
        for token, score in zip(words.token_K.tolist(), words.score_K.tolist(), strict=True)
    ]
    possible.sort(key=lambda item: -item[0])
    return [(lane, live[lane].grown(token, score)) for _, lane, token, score in possible[:beams]]


def _decided(finished: list[Hypothesis], likeliest: Hypothesis, *, tokens: int, beams: int) -> bool:
    """Whether no live one can rise above the finished: at best it loses nothing more and reaches its full length."""
    scores = sorted((hypothesis.score for hypothesis in finished), reverse=True)
    return len(scores) >= beams and scores[beams - 1] >= likeliest.log_probability / tokens
