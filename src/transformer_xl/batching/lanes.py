"""Texts that one model writes side by side. Each is what it would be alone, to the bit: it has its own chance, its own past and its own end.

prompt read alone -> first token drawn alone -> joins          step   read the token that each lane drew last, draw the next
                                                               leave  the last lanes move up into the free places
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from transformer_xl.batching.events import Ended, Event, Figures, Mailbox, Wrote
from transformer_xl.generation import Sampler, Sampling, TextStream
from transformer_xl.generation.generate import Reading
from transformer_xl.inference.distribution import Distribution, Lane, Question, Words, best
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


@dataclass(frozen=True)
class Picked:
    token: int
    log_probability: float
    likeliest: Words | None


class Writing:
    """One text under way."""

    def __init__(self, options: TextOptions, *, request: "WriteRequest", mailbox: Mailbox, index: int) -> None:
        self.options, self.request, self.mailbox, self.index = options, request, mailbox, index
        self.ended = False

    def begin(self, text: TextStream, past: Collection[int]) -> None:
        """`text` stands where the new text begins, after the tokens `past`."""
        self._text, self._drawn, self._told = text.fork(stop=self.options.stop), 0, self.mailbox.drawn[self.index]
        self._sampler = Sampler(self.options.sampling)
        self._sampler.saw(past)

    def pick(self, lane: Lane) -> Question[Picked]:
        token = yield from self._sampler.pick(lane)
        if self.options.likeliest is None:
            return Picked(token, math.nan, None)
        likeliest = (yield from best(lane, self.options.likeliest)) if self.options.likeliest else None
        return Picked(token, lane.log_probability(token), likeliest)

    def accept(self, picked: Picked, reader: Reading, place: int) -> list[Event]:
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
            events.append(Ended(reason=reason, state=self._state(picked, reader, place) if self.options.keep else None))
        return events

    def _state(self, picked: Picked, reader: Reading, place: int) -> tuple[Reader, TextStream]:
        assert isinstance(reader, Reader)
        own = reader.select([place])
        own.read(torch.tensor([[picked.token]]))
        return own, self._text.fork(stop=())


TextEvents = list[tuple[Writing, Event]]
"""What there is to tell, each of its text."""


class Lanes:
    def __init__(self, reader: Reading | None = None, writings: Collection[Writing] = ()) -> None:
        """`reader` has a lane for each, has read its prompt, and is used up."""
        self.writings = list(writings)
        self._reader = reader
        self._unread: list[int] = []

    def __len__(self) -> int:
        return len(self.writings)

    def step(self) -> TextEvents:
        """Every lane reads the token it drew last and draws the next."""
        reader = self._reader
        assert reader is not None
        forgetful = [
            place
            for place, writing in enumerate(self.writings)
            if writing.options.segment
            and isinstance(reader, Reader)
            and reader.read_B[place] >= writing.options.segment
        ]
        if forgetful:
            assert isinstance(reader, Reader)
            reader.reset(forgetful)
        reader.read(torch.tensor(self._unread)[:, None])
        return self.draw()

    def draw(self) -> TextEvents:
        """The next token of every lane. Those that are at their end then leave."""
        reader = self._reader
        assert reader is not None
        assert reader.last_hidden_BD is not None
        if not bool(torch.isfinite(reader.last_hidden_BD).all()):
            raise ModelFault("hidden states that are no numbers")
        edges = reader.model.config.cluster_edges
        picked = Distribution(reader, reader.last_hidden_BD, edges=edges).ask([each.pick for each in self.writings])
        self._unread = [one.token for one in picked]
        events = [
            (writing, event)
            for place, (writing, one) in enumerate(zip(self.writings, picked, strict=True))
            for event in writing.accept(one, reader, place)
        ]
        self.leave([writing for writing in self.writings if writing.ended])
        return events

    def take(self, other: "Lanes") -> None:
        """The lanes of another, which have drawn as well."""
        if not len(other):
            return
        assert other._reader is not None
        self._reader = other._reader if self._reader is None else self._reader.grown([other._reader])
        self.writings = [*self.writings, *other.writings]
        self._unread += other._unread

    def leave(self, writings: Collection[Writing]) -> None:
        places = {place for place, writing in enumerate(self.writings) if writing in writings}
        if not places:
            return
        if len(places) == len(self.writings):
            self.clear()
            return
        assert self._reader is not None
        self._reader, order = self._reader.without(places)
        self.writings = [self.writings[place] for place in order]
        self._unread = [self._unread[place] for place in order]

    def clear(self) -> list[Writing]:
        """Nobody is left; those who were."""
        left, self.writings, self._unread, self._reader = self.writings, [], [], None
        return left
