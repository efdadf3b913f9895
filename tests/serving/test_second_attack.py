"""Requests that are given up, and cheap ones in great numbers: nothing of them is kept, nothing is done for nobody, and everybody else is answered."""

import asyncio
import threading
import time
from collections.abc import Generator

from transformer_xl.serving.events import Mailbox
from transformer_xl.serving.metrics import Counts
from transformer_xl.serving.scheduler import Scheduler, Task

# --- the model's threads


def test_what_was_cancelled_is_let_go_at_once_and_never_computed():
    """While the thread is at a long piece: its place was given to others."""
    begun, go_on, computed = threading.Event(), threading.Event(), list[int]()

    def long() -> Generator[int, None, str]:
        begun.set()
        go_on.wait(10)
        yield 1
        return "done"

    def other(number: int) -> Generator[int, None, str]:
        computed.append(number)
        yield 1
        return "done"

    async def scenario() -> None:
        scheduler = Scheduler("small", counts=Counts(), proof=lambda: None)
        scheduler.start()
        first = Mailbox(deadline=time.monotonic() + 60)
        scheduler.submit(Task(long(), mailbox=first))
        assert begun.wait(10)
        for number in range(200):
            mailbox = Mailbox(deadline=time.monotonic() + 60)
            scheduler.submit(Task(other(number), mailbox=mailbox))
            mailbox.cancelled = True
            scheduler.wake()
            assert scheduler.under_way == 1
        late, last = Mailbox(deadline=time.monotonic() + 0.05), Mailbox(deadline=time.monotonic() + 60)
        scheduler.submit(Task(other(-1), mailbox=late))
        scheduler.submit(Task(other(1000), mailbox=last))
        await asyncio.sleep(0.1)
        go_on.set()
        assert (await asyncio.wait_for(late.next(), 10))[1].status == 504
        assert (await asyncio.wait_for(last.next(), 10))[1].result == "done"
        assert scheduler.close()
        assert computed == [1000]

    asyncio.run(scenario())


def test_attention_is_computed_in_pieces_that_may_take_turns(server):
    served = server.server.app.state.models["small"]
    tokens = [101, 102, 103, 32] * 100
    kept = served._twin.config, served._twin.attend

    def looking() -> Generator[int, None, dict[str, object]]:
        return served.looking(tokens, position=399, layer=1, head=0)

    def whole(pieces: Generator[int, None, dict[str, object]]) -> tuple[list[int], dict[str, object]]:
        found = list[int]()
        while True:
            try:
                found.append(next(pieces))
            except StopIteration as finished:
                return found, finished.value

    one, other = looking(), looking()
    next(one)
    assert (served._twin.config, served._twin.attend) == kept
    read, alone = whole(other)
    assert len(read) > 1
    assert max(read) <= served.segment
    assert whole(one)[1] == alone
