"""Requests that are given up, and cheap ones in great numbers: nothing of them is kept, nothing is done for nobody, and everybody else is answered."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager

from serving_helpers import Running, in_thread

from transformer_xl.serving import saved as saved_module
from transformer_xl.serving.events import Mailbox
from transformer_xl.serving.limits import Limits
from transformer_xl.serving.metrics import Counts
from transformer_xl.serving.scheduler import Scheduler, Task


def wait(true: Callable[[], bool], *, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "still not"
        time.sleep(0.01)


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


# --- saved sessions


@contextmanager
def disk_busy(server: Running) -> Iterator[list[str]]:
    """The thread of saved sessions is at something, and everything else waits; what was begun, by name."""
    saved, go_on, begun = server.server.app.state.saved, threading.Event(), list[str]()
    sizes = saved._sizes

    def counted() -> dict[str, int]:
        begun.append("names")
        return sizes()

    saved._sizes = counted
    saved._disk.submit(go_on.wait, 30)
    try:
        yield begun
    finally:
        go_on.set()


def asking(server: Running, path: str = "/v1/sessions/saved") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    return connection


def test_who_waits_for_the_disk_is_bounded_and_whoever_left_is_not_served(trained_run, tmp_path):
    with in_thread(trained_run, sessions=tmp_path) as server, ExitStack() as stack:
        saved = server.server.app.state.saved
        with disk_busy(server) as begun:
            asked = [stack.enter_context(asking(server)) for _ in range(saved_module.MOST_WAITING)]
            wait(lambda: saved._waiting == len(asked), seconds=10)
            refused = server.get("/v1/sessions/saved")
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            for connection in asked[1:]:
                connection.close()
            wait(lambda: saved._waiting == 1, seconds=10)
        assert b"200 OK" in asked[0].recv(1000)
        assert server.get("/v1/sessions/saved").status_code == 200
        assert len(begun) == 2


def test_the_disk_has_a_deadline(trained_run, tmp_path):
    with in_thread(trained_run, sessions=tmp_path, limits=Limits(deadline_seconds=0.3)) as server, disk_busy(server):
        assert server.get("/v1/sessions/saved").status_code == 504


def test_health_is_reached_though_every_connection_waits_for_the_disk(trained_run, tmp_path):
    limits = Limits(connections=8)
    with in_thread(trained_run, sessions=tmp_path, limits=limits) as server, ExitStack() as stack:
        body = {"model": "small", "prompt": "x", "max_tokens": 2000, "stream": True}
        client = stack.enter_context(server.client())
        with disk_busy(server), client.stream("POST", "/v1/completions", json=body) as written:
            for _ in range(limits.connections):
                stack.enter_context(asking(server))
            connections = server.server.server_state.connections
            wait(lambda: len(connections) == limits.connections, seconds=10)
            started_at = time.monotonic()
            assert server.get("/health").status_code == 200
            assert time.monotonic() - started_at < 5
            assert "[DONE]" in written.read().decode(), "who was admitted keeps its connection"
