"""Requests that are given up, and cheap ones in great numbers: nothing of them is kept, nothing is done for nobody, and everybody else is answered."""

import asyncio
import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from serving_helpers import Running, in_thread

from transformer_xl import files
from transformer_xl.batching.events import Failure, Mailbox
from transformer_xl.batching.requests import ReadRequest
from transformer_xl.batching.scheduler import Counts, Scheduler
from transformer_xl.data.text.tokenizers import (
    BytePairTokenizer,
    ByteTokenizer,
    CharTokenizer,
    NumberTokenizer,
    Tokenizer,
    WordTokenizer,
)
from transformer_xl.decoding import TextStream
from transformer_xl.serving.api import bodies, scoring, texts
from transformer_xl.serving.api import saved as saved_module
from transformer_xl.serving.http import aside
from transformer_xl.serving.http.connection import FOLLOWING, Impatient
from transformer_xl.serving.limits import Limits


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
        scheduler.submit(ReadRequest(long(), mailbox=first))
        assert begun.wait(10)
        for number in range(200):
            mailbox = Mailbox(deadline=time.monotonic() + 60)
            scheduler.submit(ReadRequest(other(number), mailbox=mailbox))
            mailbox.cancelled = True
            scheduler.wake()
            assert scheduler.under_way == 1
        late, last = Mailbox(deadline=time.monotonic() + 0.05), Mailbox(deadline=time.monotonic() + 60)
        scheduler.submit(ReadRequest(other(-1), mailbox=late))
        scheduler.submit(ReadRequest(other(1000), mailbox=last))
        await asyncio.sleep(0.1)
        go_on.set()
        assert (await asyncio.wait_for(late.next(), 10))[1] is Failure.TOO_LATE
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


# --- beside the event loop


def tokenizers() -> list[Tokenizer]:
    text = "one é two 日本 three\n\nfour naïve \N{PILE OF POO} five\n" * 3
    words = sorted({*text.split(), "<eos>", "<S>"})
    return [
        ByteTokenizer(),
        CharTokenizer("".join(sorted(set(text)))),
        WordTokenizer(words),
        WordTokenizer(words, marks="sentences"),
        BytePairTokenizer.learn(iter([text]), size=280, lower=False, show=False),
        NumberTokenizer(300),
    ]


def places_one_by_one(tokenizer: Tokenizer, tokens: list[int]) -> list[tuple[int, int]]:
    """As it was written first."""
    stream = TextStream(tokenizer)
    parts = [stream.bytes_of(token) for token in tokens]
    character_of, spans, at = texts._characters(b"".join(parts)), list[tuple[int, int]](), 0
    for part in parts:
        first = max(0, int(character_of[at])) + (isinstance(tokenizer, WordTokenizer) and part.startswith(b" "))
        spans.append((first, max(first, int(character_of[at + len(part) - 1]) + 1) if part else first))
        at += len(part)
    return spans


@pytest.mark.parametrize("tokenizer", tokenizers(), ids=lambda tokenizer: tokenizer.kind)
def test_places_of_many_tokens_are_those_of_one_by_one(tokenizer):
    for seed, count in enumerate((1, 2, 7, 500, 3000)):
        tokens = np.random.default_rng(seed).integers(tokenizer.size, size=count).tolist()
        found = texts._of_tokens(tokenizer, tokens)
        assert list(zip(found.start_P.tolist(), found.end_P.tolist(), strict=True)) == places_one_by_one(
            tokenizer, tokens
        )
        pushed, read = TextStream(tokenizer), TextStream(tokenizer)
        for token in tokens:
            pushed.push(token)
        read.read(tokens[: count // 2])
        read.read(tokens[count // 2 :])
        assert (read.place(), read.characters) == (pushed.place(), pushed.characters)


def test_places_of_many_tokens_take_no_longer_than_those_of_a_text():
    tokenizer = ByteTokenizer()
    texts._all_bytes(tokenizer)
    used = time.process_time()
    texts._of_tokens(tokenizer, [101] * 65_536)
    TextStream(tokenizer).read([101] * 65_536)
    assert time.process_time() - used < 0.2  # one by one: 0.5 s for each of the two


def test_what_nobody_waits_for_is_not_begun_beside_the_event_loop(server, monkeypatch):
    begun, go_on = list[int](), threading.Event()
    placed = scoring.placed

    def counted(*given: Any) -> texts.PlacedTokens:
        begun.append(1)
        return placed(*given)

    monkeypatch.setattr(scoring, "placed", counted)
    body = json.dumps({"model": "small", "tokens": [101] * 2000}).encode()
    head = b"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    admission = server.server.app.state.admission
    parsed, read_body = threading.Semaphore(0), bodies.read_body

    def then_busy(*given: Any) -> Any:
        found = read_body(*given)
        if threading.current_thread().name.startswith("txl-aside"):
            aside._THREAD.submit(go_on.wait, 30)
            parsed.release()
        return found

    monkeypatch.setattr(bodies, "read_body", then_busy)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head % len(body) + body)
        assert parsed.acquire(timeout=10)
        wait(lambda: admission.in_flight == 1, seconds=10)
    try:
        wait(lambda: admission.in_flight == 0, seconds=10)
    finally:
        go_on.set()
    assert server.complete("x", max_tokens=1)
    assert not begun


# --- many cheap requests


def test_the_description_is_made_once(server, monkeypatch):
    monkeypatch.setattr(server.server.app, "openapi", lambda: pytest.fail("made again"))
    found = server.get("/openapi.json")
    assert found.headers["Content-Type"] == "application/json"
    assert found.json()["components"]["schemas"]["Score"]["properties"]["model"]["enum"] == ["small"]


def test_requests_sent_ahead_are_answered_in_order_and_a_few_at_a_turn(server, monkeypatch):
    at_a_turn, handled = list[int](), Impatient.handle_events
    monkeypatch.setattr(Impatient, "handle_events", lambda self: (at_a_turn.append(1), handled(self))[1])
    turns, follow = list[int](), Impatient._follow

    def counted(self: Impatient) -> None:
        at_a_turn.clear()
        follow(self)
        turns.append(len(at_a_turn))

    monkeypatch.setattr(Impatient, "_follow", counted)
    ahead = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 19
    last = b"GET /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    with ExitStack() as stack:
        asked = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(60)]
        for connection in asked:
            connection.sendall(ahead + last)
        for connection in asked:
            connection.settimeout(20)
            found = b""
            while part := connection.recv(65536):
                found += part
            statuses = re.findall(rb"HTTP/1\.1 (\d+)", found)
            assert statuses == [b"200"] * 19 + [b"404"]
    assert sum(turns) >= 60 * 19
    assert max(turns) <= FOLLOWING


# --- what is put back, and what is asked for


def test_a_folder_that_somebody_holds_stops_nobody_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PUT_BACK_SECONDS", 0.2)
    for name in ("y", "z"):
        (tmp_path / f".txl-aside-{name}").mkdir()
    held = os.open(tmp_path / ".txl-aside-y", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    looking = threading.Thread(target=files.put_back_all, args=(tmp_path,), daemon=True)
    looking.start()
    looking.join(5)
    assert not looking.is_alive()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".txl-aside-y", "z"]
    os.close(held)
    files.put_back_all(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["y", "z"]


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        ("/health?" + "x" * 8000, {}, 200),
        ("/health?" + "x" * 8200, {}, 431),
        ("/" + "x" * 8200, {}, 431),
        ("/health", {"Host": "127.0.0.1?x"}, 403),
        ("/health", {"Host": "127.0.0.1#x"}, 403),
        ("/health", {"Host": "127.0.0.1?"}, 403),
        ("/health", {"Origin": "http://127.0.0.1"}, 200),
        ("/health", {"Origin": "http://127.0.0.1?x"}, 403),
        ("/health", {"Origin": "http://127.0.0.1#"}, 403),
        ("/health", {"Origin": "http://127.0.0.1/"}, 403),
    ],
)
def test_long_addresses_and_hosts_that_say_more_are_refused(server, target, headers, status):
    lines = "".join(f"{name}: {value}\r\n" for name, value in {"Host": "127.0.0.1", **headers}.items())
    answer = server.raw(f"GET {target} HTTP/1.1\r\n{lines}\r\n".encode())
    assert int(answer[9:12]) == status
