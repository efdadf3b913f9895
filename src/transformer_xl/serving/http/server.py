"""A server from its first to its last request: opens its port, says where, and at SIGTERM lets what is under way finish."""

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn
from fastapi import FastAPI

from transformer_xl.errors import InputError
from transformer_xl.serving.http.connection import protocol
from transformer_xl.serving.http.logs import on_error, quieten
from transformer_xl.serving.limits import HEADER_BYTES, RESERVED_FILES, Limits

CLOSING_SECONDS = 1
"""For answers that are being sent when everything else is over."""
BACKLOG = 1024
"""Connections that the system keeps while they wait to be accepted."""
ACCEPTED = 64
"""Of them, so many are accepted at a time; each is a file until the limit of connections is looked at."""
SWITCH_SECONDS = 0.0005
"""A model's thread waits no longer for its next step while connections are busy, nor they for it; Python's own 5 ms are a step's whole time."""


class Server(uvicorn.Server):
    """First nobody new is let in, then what is under way finishes, then the connections close."""

    def __init__(self, config: uvicorn.Config, *, app: FastAPI, limits: Limits) -> None:
        super().__init__(config)
        self.app, self.limits = app, limits
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(on_error)
        quieten()
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; a second one ends at once."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        admission = self.app.state.admission
        admission.draining = True
        until = asyncio.get_running_loop().time() + self.limits.drain_seconds
        while admission.in_flight and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)
        admission.send_away()
        self.should_exit = True


def make_server(app: FastAPI, *, limits: Limits, host: str = "127.0.0.1", port: int = 0) -> Server:
    """`app.state.admission` says whether it is full, lets nobody new in, and sends away whoever still waits."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=protocol(limits, crowded=lambda: app.state.admission.full, most=connections_possible(limits)),
        ws="none",
        lifespan="on",
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        backlog=ACCEPTED,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=limits.keep_alive_seconds,
        timeout_graceful_shutdown=CLOSING_SECONDS,
        proxy_headers=False,
    )
    return Server(config, app=app, limits=limits)


def connections_possible(limits: Limits) -> int:
    """As many as the limits say, if the system lets this process open so many files; it is asked for all that it would give."""
    if sys.platform == "win32":  # which knows no such limit
        return limits.connections
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems say they would and do not
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = limits.connections if files == resource.RLIM_INFINITY else files - RESERVED_FILES
    possible = min(limits.connections, room)
    if possible < 1:
        raise InputError(
            f"this process may open {files} files, and a server needs more than {RESERVED_FILES}; raise it, for example: ulimit -n 1024"
        )
    return possible


def serve(server: Server, *, ready: Callable[[str], None]) -> bool:
    """Until SIGTERM or Ctrl-C. `ready` is told the address. Whether all threads have ended; with one that is stuck, Python could not end well either."""
    host = server.config.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, server.config.port))
    except OSError as error:
        listening.close()
        port = server.config.port
        raise InputError(f"`port=`: {port} on {host} cannot be opened ({error.strerror}); take another") from None
    listening.listen(BACKLOG)
    shown = f"[{host}]" if ":" in host else host
    ready(f"http://{shown}:{listening.getsockname()[1]}")
    sys.setswitchinterval(SWITCH_SECONDS)
    # What is here by now stays: looking through it for garbage would take a fifth of a second each time, in which nothing else happens.
    gc.collect()
    gc.freeze()
    server.run(sockets=[listening])
    return bool(getattr(server.app.state, "ended", True))
