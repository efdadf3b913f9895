"""Connections that wait for nobody for long: headers, body and reading the answer each have their time, and there are so many and no more.

    headers -> body -> answer -> idle -> headers ...       what is waited for; each but idle, which keep-alive ends, has a clock
                       unread                              at any time: the client has not taken what it was sent

Plain uvicorn lets a client that sends or reads a byte now and then hold a connection, and all that its request took, for ever.
"""

import asyncio
import socket
from collections.abc import Callable
from itertools import chain
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from transformer_xl.serving.limits import BODY_CHUNKS, HEADER_BYTES, RECEIVED_BYTES, UNSENT_BYTES, Limits

ADMITTED = "admitted"
"""In the state of a request that a model works for: its connection is not ended to make room."""
LATE_SECONDS = 2.0
"""After its deadline, a request's answer (which then says so) may take so long."""
FOLLOWING = 16
"""Requests that were sent ahead, taken up at a turn of the event loop."""
DROPPED_FIRST = ("headers", "idle", "body", "unread")
"""Who makes room for a new connection: of the first kind that there is, the one that has been waiting longest; if there is none, of those who wait for
an answer, the longest that was not admitted to a model."""


class WithoutCrumbs(h11.Connection):
    """Takes no body in crumbs: each costs as much as a chunk of any size."""

    _chunks = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
        self._chunks += isinstance(event, h11.Data) and event.chunk_start
        if self._chunks > BODY_CHUNKS:
            raise h11.RemoteProtocolError("a body in crumbs")
        return event


class Impatient(H11Protocol):
    limits: Limits
    crowded: Callable[[], bool]
    """Whether somebody else waits for the place that an unread answer takes."""
    waiting: dict[str, dict["Impatient", None]]
    """All connections, by what each waits for, longest first."""
    following: dict["Impatient", None]
    """Connections whose next request is here already, in the order in which they take it up: so many at a turn of the event loop."""
    most: int

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = WithoutCrumbs(h11.SERVER, HEADER_BYTES)
        self._waits_for: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._unread_since = 0.0

    # --- what happens to it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connected = transport.get_extra_info("socket")
        # Else the kernel keeps the last bytes of an answer for 40 ms, in case more should come.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
        # What the kernel does not take waits here, and nothing more is made until that is gone: every byte of it is somebody who does not read.
        transport.set_write_buffer_limits(high=0)
        if hasattr(transport, "max_size"):  # asyncio's own reads 256 KiB at once, which can be ten thousand chunks
            transport.max_size = RECEIVED_BYTES
        if len(self.connections) > self.most and not self._make_room():
            transport.abort()
            return
        self._wait_for("headers")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        self._wait_for(None)  # the next answer has its own time, though its request may be here already
        if self.conn.trailing_data[0]:
            if not self.following:
                self.loop.call_soon(self._follow)
            self.following[self] = None
        super().on_response_complete()
        self._look()

    def handle_events(self) -> None:
        """Whose next request waits for its turn waits with everything else it sent."""
        if self not in self.following:
            super().handle_events()

    def _follow(self) -> None:
        """Requests sent ahead are not taken up all at once: whoever sends one at a time would wait for them all."""
        for connection in list(self.following)[:FOLLOWING]:
            del self.following[connection]
            if not connection.transport.is_closing():
                connection.handle_events()
                connection._look()
        if self.following:
            self.loop.call_soon(self._follow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        self._read()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Where there is still an answer to give; else the rest of what was sent is no concern of ours."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None:
                self.cycle.disconnected = True  # its request's work finds nobody to answer
                self.cycle.message_event.set()
            super().send_400_response(msg)
        else:
            self.transport.abort()

    # --- what it waits for

    def _look(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            self._wait_for("body")
        elif self.cycle is not None and not self.cycle.response_complete:
            self._wait_for("answer")
        elif self.conn.their_state is h11.IDLE:
            self._wait_for("headers" if self.cycle is None or self.conn.trailing_data[0] else "idle")
        else:
            self._wait_for(None)

    def _wait_for(self, what: str | None) -> None:
        """Starts the clock where something new is awaited: a byte more of the same does not wind it up."""
        if what == self._waits_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._waits_for is not None:
            self.waiting[self._waits_for].pop(self, None)
        self._waits_for, self._timer = what, None
        if what is not None:
            self.waiting[what][self] = None
            seconds = {
                "headers": self.limits.header_seconds,
                "body": self.limits.body_seconds,
                "answer": self.limits.deadline_seconds + LATE_SECONDS,
            }
            if what in seconds:
                self._timer = self.loop.call_later(seconds[what], self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.waiting["unread"][self] = None
        self._unread_since = self.loop.time()
        self._unread_timer = self.loop.call_later(self._patience(), self._still_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read()

    def _read(self) -> None:
        self.waiting["unread"].pop(self, None)
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _patience(self) -> float:
        return min(self.limits.crowded_seconds, self.limits.write_seconds)

    def _still_unread(self) -> None:
        if self.crowded() or self.loop.time() - self._unread_since >= self.limits.write_seconds:
            self.transport.abort()
        else:
            self._unread_timer = self.loop.call_later(self._patience(), self._still_unread)

    def _make_room(self) -> bool:
        waiting = (one for what in DROPPED_FIRST for one in self.waiting[what])
        not_admitted = (one for one in self.waiting["answer"] if ADMITTED not in one.scope["state"])
        longest = next(chain(waiting, not_admitted), None)
        if longest is None:
            return False
        self.connections.discard(longest)
        longest._wait_for(None)
        longest._read()
        longest.transport.abort()
        return True


def protocol(limits: Limits, *, crowded: Callable[[], bool], most: int) -> type[H11Protocol]:
    """The protocol class that uvicorn makes a connection of; `most` at a time."""
    waiting: dict[str, dict[Impatient, None]] = {what: {} for what in (*DROPPED_FIRST, "answer")}
    shared = {"limits": limits, "crowded": staticmethod(crowded), "waiting": waiting, "following": {}, "most": most}
    return type("Connection", (Impatient,), shared)
