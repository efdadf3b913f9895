"""Who may come in: so many texts and tasks at a time, each for so long, and nobody new once the server is stopping."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request

from transformer_xl.serving.events import Done, Event, Failed, Mailbox
from transformer_xl.serving.limits import Limits
from transformer_xl.serving.models import Served
from transformer_xl.serving.refusals import SAYINGS, Refusal

GRACE_SECONDS = 0.5
"""After its deadline a request waits so long for its model's thread to say so itself."""
GONE = 499
"""What a client that left is counted as; nobody reads it."""

Result = TypeVar("Result")


class Admission:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.in_flight = 0
        self.draining = False
        self.waiting: set[Mailbox] = set()

    def send_away(self) -> None:
        """Whoever still waits."""
        for mailbox in self.waiting:
            mailbox.put(0, Failed(status=503, message=SAYINGS[503]))


@dataclass
class Slot:
    """A request's place, from its admission until its answer is sent or its client gone."""

    admission: Admission
    request: Request
    taken: int = 0
    _held: list[tuple[Mailbox, Served, asyncio.TimerHandle]] = field(default_factory=list)

    def take(self, served: Served, count: int = 1) -> Mailbox:
        limits = self.admission.limits
        if self.admission.draining:
            raise Refusal(503)
        if count > limits.admitted:
            raise Refusal(422, f"n: at most {limits.admitted} texts at a time")
        if self.admission.in_flight + count > limits.admitted:
            raise Refusal(429)
        self.admission.in_flight += count
        self.taken += count
        mailbox = Mailbox(deadline=time.monotonic() + limits.deadline_seconds)
        too_late = Failed(status=504, message=SAYINGS[504])
        timer = mailbox.loop.call_later(limits.deadline_seconds + GRACE_SECONDS, mailbox.put, 0, too_late)
        self.admission.waiting.add(mailbox)
        self._held.append((mailbox, served, timer))
        return mailbox

    def free(self) -> None:
        self.admission.in_flight -= self.taken
        self.taken = 0
        for mailbox, served, timer in self._held:
            timer.cancel()
            self.admission.waiting.discard(mailbox)
            mailbox.cancelled = True
            served.wake()

    async def next(self, mailbox: Mailbox) -> tuple[int, Event]:
        """The next event; a refusal where it is too late, the server stops, or the model failed."""
        index, event = await mailbox.next()
        if isinstance(event, Failed):
            raise Refusal(event.status, event.message)
        return index, event

    async def result(self, mailbox: Mailbox) -> object:
        """Of a task. A client that leaves meanwhile cancels it."""
        _, event = await self.unless_gone(self.next(mailbox))
        assert isinstance(event, Done)
        return event.result

    async def unless_gone(self, work: Awaitable[Result]) -> Result:
        working, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Refusal(GONE)
            return await working
        finally:
            for task in (working, gone):
                task.cancel()

    async def _gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass


async def slot(request: Request) -> AsyncIterator[Slot]:
    """A dependency, for it is left when the answer is sent or its client gone, however far that came."""
    place = Slot(request.app.state.admission, request)
    try:
        yield place
    finally:
        place.free()
