"""A connection that waits for nobody for long: headers and body must each be whole in time.

Plain uvicorn lets a client that sends a byte now and then hold a connection for ever (slow loris).
"""

import asyncio
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from transformer_xl.serving.limits import Limits


def protocol(limits: Limits) -> type[H11Protocol]:
    """The protocol class that uvicorn makes a connection of."""
    seconds = {"headers": limits.header_seconds, "body": limits.body_seconds}

    class Impatient(H11Protocol):
        _waits_for: str | None = None
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # Else the kernel keeps the last bytes of an answer for 40 ms, in case more should come.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._wait_for("headers")

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            self._wait_for(None)
            super().connection_lost(exc)

        def _look(self) -> None:
            """What is awaited now. Between two requests nothing is: there keep-alive has its own time."""
            if self.conn.their_state is h11.SEND_BODY:
                self._wait_for("body")
            elif self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
                self._wait_for("headers")
            else:
                self._wait_for(None)

        def _wait_for(self, what: str | None) -> None:
            """Starts the clock where something new is awaited: a byte more of the same does not wind it up."""
            if what == self._waits_for:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._waits_for = what
            self._timer = None if what is None else self.loop.call_later(seconds[what], self._give_up)

        def _give_up(self) -> None:
            if not self.transport.is_closing():
                self.transport.abort()

    return Impatient
