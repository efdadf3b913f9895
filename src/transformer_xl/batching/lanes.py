"""Texts that one model writes side by side. Each is what it would be alone, to the bit: it has its own chance, its own past and its own end.

prompt read alone -> first token drawn alone -> joins          step   read the token that each lane drew last, draw the next
                                                               leave  the last lanes move up into the free places
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer_xl.batching.events import Ended, Event, Figures, Mailbox, Wrote
from transformer_xl.decoding import Sampler, Sampling, TextStream
from transformer_xl.decoding import lanes as decoding
from transformer_xl.decoding.distribution import Lane, Question, best
from transformer_xl.decoding.lanes import Picked
from transformer_xl.inference.reader import Reader
from transformer_xl.native import FEW

if TYPE_CHECKING:
    from transformer_xl.batching.requests import WriteRequest

LANES = FEW
"""Texts that one model writes side by side: so many vectors the kernels multiply with the same bits for each, whatever the others are."""


class ModelFault(Exception):
    """The model gave something that is no answer."""


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """What is asked of one text."""

    sampling: Sampling
    tokens: int
    stop: tuple[str, ...] = ()
    likeliest: int | None = None
    """How many of the likeliest tokens are told at each place; None: nothing is told but text."""
    segment: int | None = None
    """The model forgets whenever it has read so many tokens. None: never."""
    keep: bool = False
    """The end tells what has read the whole text."""


class Writing:
    """One text under way."""

    def __init__(self, options: TextOptions, *, request: "WriteRequest", mailbox: Mailbox, index: int) -> None:
        self.options, self.request, self.mailbox, self.index = options, request, mailbox, index
        self.ended = False

    def begin(self, text: TextStream, past: Collection[int]) -> None:
        """`text` stands where the new text begins, after the tokens `past`."""
        self._text, self._drawn, self._told = text.fork(stop=self.options.stop), 0, self.mailbox.drawn[self.index]
        self.sampler = Sampler(self.options.sampling)
        self.sampler.saw(past)

    @property
    def wants_tokens_only(self) -> bool:
        return self.options.likeliest is None

    @property
    def forgets_after(self) -> int | None:
        return self.options.segment

    def pick(self, lane: Lane) -> Question[Picked]:
        token = yield from self.sampler.pick(lane)
        if self.options.likeliest is None:
            return Picked(token)
        likeliest = (yield from best(lane, self.options.likeliest)) if self.options.likeliest else None
        return Picked(token, lane.log_probability(token), likeliest)

    def written(self) -> TextStream:
        """Where its text stands, for whoever goes on from it."""
        return self._text.fork(stop=())

    def accept(self, picked: Picked, reader: Reader, place: int) -> list[Event]:
        """What there is to tell now that this token is drawn."""
        self._drawn += 1
        start = self._text.characters
        piece = self._text.push(picked.token)
        reason = "stop" if self._text.stopped else "length" if self._drawn == self.options.tokens else None
        if reason:
            piece += self._text.finish()
        events: list[Event] = []
        if self._drawn > self._told:
            figures = None
            if self.options.likeliest is not None:
                figures = Figures()
                figures.add(
                    picked.token, start=start, log_probability=picked.log_probability, likeliest=picked.likeliest
                )
            events.append(Wrote(text=piece, figures=figures))
        if reason:
            self.ended = True
            state = None
            if self.options.keep:
                own = reader.select([place])
                own.read(own.tokens([[picked.token]]))
                state = own, self.written()
            events.append(Ended(reason=reason, state=state))
        return events


TextEvents = list[tuple[Writing, Event]]
"""What there is to tell, each of its text."""


class Lanes(decoding.Lanes[Writing]):
    """The loop, with what there is to tell of each token. Those that are at their end leave."""

    def step(self) -> TextEvents:
        drawn = list(zip(self.writers, self.next(), strict=True))
        assert self.reader is not None
        events = [
            (writing, event)
            for place, (writing, picked) in enumerate(drawn)
            for event in writing.accept(picked, self.reader, place)
        ]
        self.leave([writing for writing, _ in drawn if writing.ended])
        return events
