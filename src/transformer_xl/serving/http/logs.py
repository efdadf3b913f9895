"""What a server says of strangers: the same thing once in a while, with how often. Whoever may connect could otherwise fill a disk with lines.

And, where somebody asked for it, a line of each request."""

import asyncio
import logging
import sys
import threading
import time
from contextlib import suppress
from queue import Full, Queue
from typing import Any

AGAIN_SECONDS = 10.0
REMEMBERED = 256
MOST_LINES = 10_000
"""That wait to be written."""
log = logging.getLogger("transformer_xl.serving.connections")


class OnceInAWhile(logging.Filter):
    """Lets the same message pass once in some seconds, and says then how many were left out."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, tuple[float, int]] = {}
        """By message: when it was last said, and how often not since."""

    def filter(self, record: logging.LogRecord) -> bool:
        what = str(record.msg).partition("\n")[0]  # asyncio writes names of sockets below
        said_at, left_out = self._said.get(what, (-AGAIN_SECONDS, 0))
        if time.monotonic() < said_at + AGAIN_SECONDS:
            self._said[what] = (said_at, left_out + 1)
            return False
        if len(self._said) >= REMEMBERED:
            self._said.clear()
        self._said[what] = (time.monotonic(), 0)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out:,} more like it)", ()
        return True


def quieten() -> None:
    """What anybody can bring about by what they send, or by connecting."""
    for name in ("uvicorn.error", "asyncio", log.name):
        logger = logging.getLogger(name)
        if not any(isinstance(one, OnceInAWhile) for one in logger.filters):
            logger.addFilter(OnceInAWhile())


def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's handler of what nobody else handled."""
    if "accept" in str(context.get("message")):
        log.error("a connection cannot be accepted: %s; raise the limit of open files", context.get("exception"))
    else:
        loop.default_exception_handler(context)


class LinesAside:
    """Lines on stderr, written by a thread: who reads them may be slow, and requests do not wait for that. What waits too long is left out and counted."""

    def __init__(self) -> None:
        self._waiting: Queue[str] = Queue(MOST_LINES)
        self._left_out = 0
        threading.Thread(target=self._write, name="txl-log", daemon=True).start()

    def __call__(self, line: str) -> None:
        try:
            self._waiting.put_nowait(line)
        except Full:
            self._left_out += 1

    def _write(self) -> None:
        while True:
            line = self._waiting.get()
            with suppress(OSError, ValueError):  # nobody reads them any more
                if self._left_out:
                    sys.stderr.write(f'{{"left_out": {self._left_out}}}\n')
                    self._left_out = 0
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()
