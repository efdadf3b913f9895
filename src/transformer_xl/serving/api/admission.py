"""Who may come in: so many texts and tasks at a time, each for so long, and nobody new once the server is stopping."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fastapi import Request

from transformer_xl.batching.budget import Cost, needed_bytes
from transformer_xl.batching.events import Done, Event, Failure, Mailbox
from transformer_xl.errors import InputError
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.api.refusals import Refusal
from transformer_xl.serving.http.aside import aside_unless_gone, unless_gone
from transformer_xl.serving.http.connection import ADMITTED
from transformer_xl.serving.limits import ANSWER_BYTES, FIGURES, Limits

SHARE = 0.75
"""Of what there is, so much is for models; the rest is for bodies, answers, and the stacks and heaps of threads."""
GRACE_SECONDS = 0.5
"""After its deadline a request waits so long for its model's thread to say so itself."""

TOO_MANY = (
    "max_tokens, logprobs, n: the answer would hold {:,} figures: new tokens, and the prompt's with echo, times 1 + logprobs, times n;"
    " ask for at most {:,}"
)
TOO_LARGE = "the answer could take {:,} bytes; ask for less, at most {:,} bytes"
FAILURES: dict[Failure, tuple[int, str | None]] = {
    Failure.FAILED: (500, "the model failed on this request; nothing of it was kept"),
    Failure.TOO_LATE: (504, "the model took too long over this request; ask for less, or try again"),
    Failure.UNANSWERED: (504, None),
    Failure.STOPPING: (503, None),
}

Result = TypeVar("Result")


class Admission:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.in_flight = 0
        self.figures = 0
        """Of all answers under way."""
        self.draining = False
        self.waiting: set[Mailbox] = set()

    @property
    def full(self) -> bool:
        return self.in_flight >= self.limits.admitted or self.figures + FIGURES > self.limits.figures

    def check(self, count: int = 1) -> None:
        """Whether anybody is let in at all."""
        if self.draining:
            raise Refusal(503)
        if self.in_flight + count > self.limits.admitted:
            raise Refusal(429)

    def send_away(self) -> None:
        """Whoever still waits."""
        for mailbox in self.waiting:
            mailbox.end(Failure.STOPPING)


def within_memory(limits: Limits, costs: Sequence[Cost], *, available: int | None) -> Limits:
    """The limits themselves, or as many texts and sessions as there is memory for; half of what is left is for sessions that learn."""
    if available is None:
        return limits
    share = int(SHARE * available)

    def with_texts(admitted: int) -> Limits:
        return replace(limits, admitted=admitted, sessions=max(1, limits.sessions * admitted // limits.admitted))

    def needed(admitted: int) -> int:
        fewer = with_texts(admitted)
        return needed_bytes(costs, admitted=fewer.admitted, sessions=fewer.sessions)

    fitting = bisect_right(range(1, limits.admitted + 1), share, key=needed)
    if not fitting:
        raise InputError(
            f"`memory=`: one text and {with_texts(1).sessions} sessions at a time need up to {gigabytes(needed(1))}, and of {gigabytes(available)}"
            f" there are {gigabytes(share)} for models; give a smaller `memory=` or `max_sessions=`, or serve fewer runs"
        )
    return replace(with_texts(fitting), learning_bytes=(share - needed(fitting)) // 2)


def gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much an answer can come to."""

    figures: int
    """That it tells."""
    kept: int
    """That are kept until it is sent: those of a prompt once, however many texts go on from it."""
    size: int
    """Bytes."""


@dataclass
class Ticket:
    """A request's place, from its admission until its answer is sent or its client gone."""

    admission: Admission
    request: Request
    taken: int = 0
    figures: int = 0
    _held: list[tuple[Mailbox, Served, asyncio.TimerHandle]] = field(default_factory=list)

    def take(self, served: Served, count: int = 1) -> Mailbox:
        limits = self.admission.limits
        if count > limits.admitted:
            raise Refusal(422, f"n: at most {limits.admitted} texts at a time")
        self.admission.check(count)
        self.admission.in_flight += count
        self.taken += count
        self.request.scope["state"][ADMITTED] = True
        mailbox = Mailbox(deadline=time.monotonic() + limits.deadline_seconds)
        timer = mailbox.loop.call_later(limits.deadline_seconds + GRACE_SECONDS, mailbox.put, 0, Failure.UNANSWERED)
        self.admission.waiting.add(mailbox)
        self._held.append((mailbox, served, timer))
        return mailbox

    def reserve(self, extent: Extent) -> None:
        """Memory for the answer. What is too large is refused, whoever else is here."""
        if extent.figures > FIGURES:
            raise Refusal(422, TOO_MANY.format(extent.figures, FIGURES))
        if extent.size > ANSWER_BYTES:
            raise Refusal(422, TOO_LARGE.format(extent.size, ANSWER_BYTES))
        if self.admission.figures + extent.kept > self.admission.limits.figures:
            raise Refusal(429)
        self.admission.figures += extent.kept
        self.figures += extent.kept

    def free(self) -> None:
        self.admission.in_flight -= self.taken
        self.admission.figures -= self.figures
        self.taken = self.figures = 0
        for mailbox, served, timer in self._held:
            timer.cancel()
            self.admission.waiting.discard(mailbox)
            mailbox.cancelled = True
            served.wake()

    async def next(self, mailbox: Mailbox) -> tuple[int, Event]:
        """The next event; a refusal where it is too late, the server stops, or the model failed."""
        index, event = await mailbox.next()
        if isinstance(event, Failure):
            raise Refusal(*FAILURES[event])
        return index, event

    async def result(self, mailbox: Mailbox) -> object:
        """Of a task. A client that leaves meanwhile cancels it."""
        _, event = await self.unless_gone(self.next(mailbox))
        assert isinstance(event, Done)
        return event.result

    async def unless_gone(self, work: Awaitable[Result]) -> Result:
        return await unless_gone(self.request.receive, work)

    async def aside(self, work: Callable[[], Result], *, small: bool) -> Result:
        """Its result, made beside the event loop where it is not small. A client that leaves before it is begun cancels it."""
        return await aside_unless_gone(self.request.receive, work, small=small)


async def ticket(request: Request) -> AsyncIterator[Ticket]:
    """A dependency, for it is left when the answer is sent or its client gone, however far that came."""
    taken = Ticket(request.app.state.admission, request)
    try:
        yield taken
    finally:
        taken.free()
