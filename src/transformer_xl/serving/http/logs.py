"""What a server says of strangers: the same thing once in a while, with how often. Whoever may connect could otherwise fill a disk with lines."""

import asyncio
import logging
import time
from typing import Any

AGAIN_SECONDS = 10.0
REMEMBERED = 256
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
