"""The loop that writes tokens, for everybody: texts side by side through one reader, each what it would be alone.

prompts read alone -> joined        next    read the token that each lane drew last, draw the next
                                    take    lanes of others join
                                    leave   the last lanes move up into the free places
                                    follow  lanes become others, forked or dropped (beams)

Whoever writes in a lane hands in what differs: its sampler, what else it wants to know of each token, when its memory ends.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from transformer_xl import native
from transformer_xl.decoding.distribution import Answer, Distribution, Lane, Question, Words
from transformer_xl.decoding.sampling import Sampler
from transformer_xl.inference import Reader


class Picked(NamedTuple):
    token: int
    log_probability: float = math.nan
    """Where it was asked for, as the likeliest are."""
    likeliest: Words | None = None


class Writer(Protocol):
    """Whoever writes in a lane."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def wants_tokens_only(self) -> bool: ...

    @property
    def forgets_after(self) -> int | None:
        """The reader forgets its lane whenever it has read so many tokens. None: never."""

    def pick(self, lane: Lane, /) -> Question[Picked]: ...


W = TypeVar("W", bound=Writer)


class Lanes(Generic[W]):
    def __init__(self, reader: Reader | None = None, writers: Collection[W] = ()) -> None:
        """`reader` has a lane for each, has read its prompt, and is used up."""
        self.writers = list(writers)
        self.reader = reader
        self._unread: list[int] = []
        self._choices: Any = None

    def __len__(self) -> int:
        return len(self.writers)

    def next(self) -> list[Picked]:
        """The next token of every lane. Reads the one before only now: nobody may want a next."""
        return self.next_few(1)[0]

    def next_few(self, most: int) -> list[list[Picked]]:
        """For each step the next token of every lane: at most so many steps, and one where Python is asked. For who wants them all."""
        if self._unread and self._below_python():
            picked = [[Picked(token) for token in drawn] for drawn in self._write(most)]
        else:
            picked = [self.ask([writer.pick for writer in self.writers])]
        self._unread = [one.token for one in picked[-1]]
        return picked

    def ask(self, questions: Sequence[Callable[[Lane], Question[Answer]]]) -> list[Answer]:
        """One question for each lane about its next token, and their answers; nothing is drawn."""
        reader = self._reader()
        if self._unread:
            self._forget()
            reader.read(reader.tokens([[token] for token in self._unread]))
            self._unread = []
        assert reader.last_hidden_BD is not None
        next_token = Distribution(reader, reader.last_hidden_BD, edges=reader.edges)
        return next_token.ask(questions)

    def follow(self, places: Sequence[int], writers: Sequence[W], tokens: Sequence[int]) -> None:
        """The lanes at these places, in this order, with other writers, and the token that each has drawn."""
        self.reader = self._reader().select(places)
        self.writers, self._unread, self._choices = list(writers), list(tokens), None

    def take(self, other: "Lanes[W]") -> None:
        """The lanes of another, which have drawn as often."""
        if not len(other):
            return
        self.reader = other._reader() if self.reader is None else self.reader.grown([other._reader()])
        self.writers = [*self.writers, *other.writers]
        self._unread += other._unread
        self._choices = None

    def leave(self, writers: Collection[W]) -> None:
        places = {place for place, writer in enumerate(self.writers) if writer in writers}
        if len(places) == len(self.writers):
            self.writers, self._unread, self.reader, self._choices = [], [], None, None
        elif places:
            self.reader, order = self._reader().without(places)
            self.writers = [self.writers[place] for place in order]
            self._unread, self._choices = [self._unread[place] for place in order], None

    # --- inside

    def _reader(self) -> Reader:
        assert self.reader is not None, "lanes without a reader write nothing"
        return self.reader

    def _forget(self) -> None:
        reader = self._reader()
        ends = [(place, writer.forgets_after) for place, writer in enumerate(self.writers)]
        forgetful = [place for place, end in ends if end and reader.read_B[place] >= end]
        if forgetful:
            reader.reset(forgetful)

    def _below_python(self) -> bool:
        """Whether the kernels can read and draw in one go, the same words for the same seeds."""
        return self._reader().writes and all(w.wants_tokens_only and w.sampler.plain for w in self.writers)

    def _write(self, most: int) -> list[list[int]]:
        self._forget()
        forget = any(writer.forgets_after for writer in self.writers)
        steps = 1 if most == 1 or forget else min(most, self._reader().most_steps)
        if self._choices is None or len(self._choices) < steps * len(self):
            choices = [writer.sampler.choice() for writer in self.writers] * steps
            self._choices = (native.Choice * len(choices))(*choices)
        for place in range(steps * len(self)):
            self._choices[place].share = self.writers[place % len(self)].sampler.share()
        return self._reader().write(self._unread, self._choices, steps)
