"""What a model's thread tells the request that waits for it."""

import asyncio
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from transformer_xl.batching.learning import Learner
from transformer_xl.decoding import TextStream
from transformer_xl.decoding.distribution import Words
from transformer_xl.inference import Reader

LEAST = -9999.0
"""JSON has no minus infinity."""
EVENT_FIGURES = 1024
"""Of one event, and of one step of making an answer."""
EVENT_CHARACTERS = 16 * 1024
BACKLOG = 256
"""So many events wait for a client that reads slowly as they are; of more, those of one text are joined."""


class Figures:
    """Tokens of a text, given or drawn, and what is told of each: in columns, because there can be a million of them."""

    def __init__(self) -> None:
        self.token = array("i")
        self.start = array("i")
        """The character of its text at which each begins."""
        self.log_probability = array("d")
        """In nats; NaN for the first token of all, which has nothing before it."""
        self.likeliest = array("i")
        """Tokens that were likeliest at each place, falling, one place after the other."""
        self.likeliest_log_probability = array("d")
        self.likeliest_until = array("i")
        """Where those of each place end."""

    def __len__(self) -> int:
        return len(self.token)

    def add(self, token: int, *, start: int, log_probability: float, likeliest: Words | None) -> None:
        self.token.append(token)
        self.start.append(start)
        self.log_probability.append(max(log_probability, LEAST) if log_probability == log_probability else math.nan)
        if likeliest is not None:
            self.likeliest.extend(likeliest.token_K.tolist())
            self.likeliest_log_probability.extend(max(score, LEAST) for score in likeliest.score_K.tolist())
        self.likeliest_until.append(len(self.likeliest))

    def extend(self, other: "Figures") -> None:
        before = len(self.likeliest)
        for name in ("token", "start", "log_probability", "likeliest", "likeliest_log_probability"):
            getattr(self, name).extend(getattr(other, name))
        self.likeliest_until.extend(before + until for until in other.likeliest_until)

    def likeliest_at(self, place: int) -> Iterator[tuple[int, float]]:
        places = slice(self.likeliest_until[place - 1] if place else 0, self.likeliest_until[place])
        return zip(self.likeliest[places], self.likeliest_log_probability[places], strict=True)


@dataclass(kw_only=True)
class Wrote:
    """Text that has become certain, and its tokens, where they were asked for."""

    text: str
    figures: Figures | None = None
    drawn: int = 1
    """How many tokens were drawn for it: 0 for an echo of the prompt."""
    texts: int = 1
    """It belongs to so many texts, from the one it is told of on: a prompt is told once for all that go on from it."""

    def join(self, other: "Wrote") -> bool:
        """Takes in what comes after it, where both together are still small."""
        if not self.drawn or len(self.text) + len(other.text) > EVENT_CHARACTERS:
            return False
        if self.figures is not None and other.figures is not None:
            if len(self.figures) + len(self.figures.likeliest) >= EVENT_FIGURES:
                return False
            self.figures.extend(other.figures)
        self.text += other.text
        self.drawn += other.drawn
        return True


@dataclass(frozen=True, kw_only=True)
class Ended:
    reason: str
    """OpenAI's words: stop, or length."""
    state: tuple[Reader | Learner, TextStream] | None = None
    """What has read the whole text, where it was asked for: a session's new state."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A text was read, and this was found."""

    result: object


class Failure(Enum):
    """Why nothing more is told."""

    FAILED = "the model failed on it"
    TOO_LATE = "the model took too long over it"
    UNANSWERED = "it is too late, and the model's thread has not even said so"
    STOPPING = "nobody is answered any more"


Event = Wrote | Ended | Done | Failure


class Mailbox:
    """Of one request, on the event loop: (which of its texts, what happened)."""

    def __init__(self, *, deadline: float) -> None:
        self.deadline = deadline
        """On the monotonic clock."""
        self.cancelled = False
        """Nobody waits any more."""
        self.drawn: Counter[int] = Counter()
        """Tokens sent of each text: one that is begun anew does not tell them again."""
        self.loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._last: dict[int, Wrote] = {}
        """Of each text, what was written last and is still waiting."""

    async def next(self) -> tuple[int, Event]:
        index, event = await self._queue.get()
        if self._last.get(index) is event:
            del self._last[index]
        return index, event

    def put(self, index: int, event: Event) -> None:
        """Only on the loop's own thread."""
        if isinstance(event, Wrote):
            last = self._last.get(index)
            if self._queue.qsize() >= BACKLOG and last is not None and last.join(event):
                return
            self._last[index] = event
        self._queue.put_nowait((index, event))

    def end(self, failure: Failure) -> None:
        """At once, before anything that still waits to be told: nobody has the time for that any more. Only on the loop's own thread."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._last.clear()
        self.put(0, failure)


class Outbox:
    """Events of one thread, sent to the loop together: one call for all lanes of a step."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Mailbox, int, Event]] = []

    def put(self, mailbox: Mailbox, index: int, event: Event) -> None:
        self._waiting.append((mailbox, index, event))

    def send(self) -> None:
        waiting = self._waiting
        if not waiting:
            return
        with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            waiting[0][0].loop.call_soon_threadsafe(_deliver, waiting)
        self._waiting = []
        for mailbox, index, event in waiting:
            if isinstance(event, Wrote):
                mailbox.drawn[index] += event.drawn


def _deliver(waiting: Iterable[tuple[Mailbox, int, Event]]) -> None:
    for mailbox, index, event in waiting:
        mailbox.put(index, event)
