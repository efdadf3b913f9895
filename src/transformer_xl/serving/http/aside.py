"""Work that grows with a request, done beside the event loop: whoever asks for little does not wait for those who ask for much.

One thread does it, in the order in which it came. More would not be quicker, because Python runs one at a time, and the event loop would have to
wait for each of them in turn. Whatever comes here is cut into short pieces: a single call into C keeps everybody else waiting until it returns.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive

Result = TypeVar("Result")

SMALL = 1024
"""A body of so many bytes, or a text of so many tokens or characters, is read where it comes in; a larger one beside the event loop."""
MOST_WAITING = 64
_waiting = 0
_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="txl-aside")


class Gone(Exception):
    """The client left."""


def busy() -> bool:
    """Whether so much waits that nothing large should be added."""
    return _waiting >= MOST_WAITING


async def aside(work: Callable[[], Result]) -> Result:
    """Its result."""
    global _waiting
    _waiting += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_THREAD, work)
    finally:
        _waiting -= 1


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Its result. If the client leaves before, it is cancelled: what has not begun on another thread then never does."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()


async def aside_unless_gone(receive: Receive, work: Callable[[], Result], *, small: bool) -> Result:
    """Both. What is `small` is done at once, here."""
    return work() if small else await unless_gone(receive, aside(work))
