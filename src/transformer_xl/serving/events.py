"""What a model's thread tells the request that waits for it."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from transformer_xl.generation import TextStream
from transformer_xl.inference import Reader


@dataclass(frozen=True, kw_only=True)
class Told:
    """A token of a text: given, or drawn."""

    token: int
    text: str
    """As people read it; bytes that are no character as \\xNN."""
    start: int
    """The character of its text at which it begins."""
    log_probability: float | None
    """In nats; None for the first token of all, which has nothing before it."""
    likeliest: tuple[tuple[int, float], ...] = ()
    """Tokens that were likeliest at its place, falling, with their log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Wrote:
    """Text that has become certain, and the tokens since the last time (empty unless asked for)."""

    text: str
    tokens: tuple[Told, ...] = ()
    drawn: int = 1
    """How many tokens were drawn for it: 0 for an echo of the prompt."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    reason: str
    """OpenAI's words: stop, or length."""
    state: tuple[Reader, TextStream] | None = None
    """What has read the whole text, where it was asked for: a session's new state."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A task's result."""

    result: object


@dataclass(frozen=True, kw_only=True)
class Failed:
    status: int
    message: str


Event = Wrote | Ended | Done | Failed


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

    async def next(self) -> tuple[int, Event]:
        return await self._queue.get()

    def put(self, index: int, event: Event) -> None:
        """Only on the loop's own thread."""
        self._queue.put_nowait((index, event))


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
