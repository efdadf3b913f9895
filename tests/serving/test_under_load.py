"""Many clients, slow clients, clients that leave, a model that breaks, a server that is told to stop (W1 to W3, W10, W11)."""

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from serving_helpers import Running, in_process, in_thread, p95

from transformer_xl.inference import Engine
from transformer_xl.serving.limits import Limits

SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]


def asynchronous(server: Running) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    return httpx.AsyncClient(base_url=server.address, timeout=120, trust_env=False, verify=False, limits=limits)


@pytest.mark.parametrize(
    ("clients", "requests", "admitted"), [(24, 2, 8), pytest.param(200, 5, 64, marks=SLOW)], ids=["quick", "full"]
)
def test_w1_every_request_of_many_clients_is_answered_with_its_own_text(
    trained_run, tmp_path, clients, requests, admitted
):
    def body(number: int) -> dict[str, object]:
        prompt = f"request {number}: " * (1 + number % 7)
        return {"model": "small", "prompt": prompt, "max_tokens": 300 + number % 9, "seed": number, "temperature": 1.0}

    total, refused = clients * requests, 0
    with in_process(trained_run, folder=tmp_path, options=("--admit", str(admitted))) as server:
        with server.client() as one:
            serial = [one.post("/v1/completions", json=body(n)).json()["choices"][0]["text"] for n in range(total)]
        before = server.metric("steps_total"), server.metric("tokens_written_total")

        async def client(http: httpx.AsyncClient, number: int, found: dict[int, str]) -> None:
            nonlocal refused
            for n in range(number * requests, (number + 1) * requests):
                while (answer := await http.post("/v1/completions", json=body(n))).status_code == 429:
                    refused += 1
                    await asyncio.sleep(random.Random(n).uniform(0.2, 1.0) * float(answer.headers["retry-after"]))
                assert answer.status_code == 200, answer.text
                found[n] = answer.json()["choices"][0]["text"]

        async def everybody() -> dict[int, str]:
            found: dict[int, str] = {}
            async with asynchronous(server) as http:
                await asyncio.gather(*(client(http, number, found) for number in range(clients)))
            return found

        started_at = time.monotonic()
        found = asyncio.run(everybody())
        seconds = time.monotonic() - started_at
        steps = server.metric("steps_total") - before[0]
        written = server.metric("tokens_written_total") - before[1]
    right = sum(found[n] == serial[n] for n in range(total))
    print(
        f"W1: {len(found)}/{total} answered, {right} as alone, {refused} times 429, {written / steps:.1f} texts a step, {seconds:.1f} s"
    )
    assert len(found) == right == total
    assert len(set(serial)) > total * 0.9, "mixed-up answers would not show"
    assert refused > 0
    assert written / steps > 1.5, "they were not written together"


@pytest.mark.parametrize("streams", [60, pytest.param(500, marks=SLOW)], ids=["quick", "full"])
def test_w2_streams_that_are_cancelled_leave_nothing_behind(trained_run, tmp_path, streams):
    with in_process(trained_run, folder=tmp_path, options=("--admit", "64")) as server:

        async def cancelled(http: httpx.AsyncClient, number: int, most: asyncio.Semaphore) -> int:
            draw, lines = random.Random(number), 0
            body = {"model": "small", "prompt": "x" * draw.randint(1, 3000), "max_tokens": 16_000, "stream": True}
            async with most:
                if number % 5 == 0:  # leaves before there is an answer, perhaps before the request is read
                    task = asyncio.create_task(http.post("/v1/completions", json=body))
                    await asyncio.sleep(draw.uniform(0, 0.03))
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    return 0
                async with http.stream("POST", "/v1/completions", json=body) as stream:
                    assert stream.status_code in (200, 429), stream.status_code
                    stop = draw.randint(1, 40)
                    reading = stream.aiter_lines()
                    async for _ in reading:
                        lines += 1
                        if lines >= stop:
                            break
                    await reading.aclose()
                return lines

        async def everybody() -> list[int]:
            most = asyncio.Semaphore(60)
            async with asynchronous(server) as http:
                return await asyncio.gather(*(cancelled(http, number, most) for number in range(streams)))

        seen = asyncio.run(everybody())
        ended_at = time.monotonic()
        while left := server.metric("in_flight") + server.metric("under_way"):
            assert time.monotonic() < ended_at + 1.0, f"{left} still in flight"
        seconds = time.monotonic() - ended_at
        written = server.metric("tokens_written_total")
        told = server.errors.read_text()
        print(
            f"W2: {streams} streams, {sum(map(bool, seen))} cancelled while they ran, 0 in flight after {seconds:.2f} s"
        )
    assert sum(map(bool, seen)) > streams * 0.6
    assert written < streams * 2_000, "they ran on"
    assert "Traceback" not in told
    assert "Error" not in told


@pytest.mark.parametrize(("count", "seconds"), [(40, 1.0), pytest.param(400, 10.0, marks=SLOW)], ids=["quick", "full"])
def test_w3_slow_loris_connections_are_closed_and_honest_clients_do_not_notice(trained_run, tmp_path, count, seconds):
    limit = 1.5 * seconds
    quick = in_thread(trained_run, limits=Limits(header_seconds=seconds, body_seconds=seconds))
    with quick if seconds < 10 else in_process(trained_run, folder=tmp_path) as server, server.client() as client:
        begun_at = time.monotonic()
        idle = p95(client, lambda: time.monotonic() > begun_at + seconds)
        command = [sys.executable, str(Path(__file__).with_name("loris.py")), str(server.port), str(count)]
        with subprocess.Popen([*command, str(2 * limit)], stdout=subprocess.PIPE, text=True) as attack:
            busy = p95(client, lambda: attack.poll() is not None)
            lived = json.loads(attack.stdout.read())
    print(
        f"W3: {count} connections, each closed after {min(lived):.1f} to {max(lived):.1f} s;"
        f" honest p95 {1000 * idle:.1f} ms idle, {1000 * busy:.1f} ms meanwhile"
    )
    assert len(lived) == count
    assert max(lived) < limit
    if seconds >= 10:
        assert busy < 2 * idle


SHORT = 100
"""Tokens of a text that is finished while the server stops."""


def test_w10_sigterm_lets_what_is_under_way_finish(trained_run, tmp_path):
    with in_process(trained_run, folder=tmp_path, options=("--admit", "64")) as server:

        def stream(number: int) -> str:
            # Every other one is far too long, and is sent away in the end.
            body = {"model": "small", "prompt": "x", "max_tokens": 16_384 if number % 2 else SHORT, "stream": True}
            try:
                return server.post("/v1/completions", **body).text
            except httpx.HTTPError as error:
                return f"{type(error).__name__}"

        with ThreadPoolExecutor(64) as pool:
            running = [pool.submit(stream, number) for number in range(64)]
            # On a busy machine the first of the short ones may be over before the last has come.
            while (in_flight := int(server.metric("under_way"))) + sum(one.done() for one in running) < 64:
                assert not any(one.done() for one in running[1::2])
            told_at = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            while server.get("/health").json()["status"] != "draining":
                assert time.monotonic() < told_at + 5
            late = server.post("/v1/completions", model="small", prompt="x")
            assert (late.status_code, late.headers["retry-after"]) == (503, "1")
            code = server.process.wait(20)
            seconds = time.monotonic() - told_at
            texts = [one.result() for one in running]
        told = server.errors.read_text()
    finished = sum(text.endswith("data: [DONE]\n\n") for text in texts)
    sent_away = sum("the server is stopping" in text for text in texts)
    print(
        f"W10: {in_flight} in flight, {finished} finished, {sent_away} were told that the server stops, over after {seconds:.1f} s"
    )
    assert code == 0
    assert seconds < 10
    assert finished >= 32
    assert finished + sent_away == 64
    assert in_flight > 32
    assert all('"finish_reason":"length"' in text for text in texts[::2])
    assert "Traceback" not in told


LENGTH = 500
"""A prompt of so many tokens is the one that breaks the model; nobody else reads so many."""


@pytest.fixture
def breaking(monkeypatch):
    """A model that breaks on one text, in its prompt or some tokens later: raises, hangs, or gives no numbers."""
    released, broken = threading.Event(), list[str]()
    read, write = Engine.read, Engine.write

    def arm(how: str, where: str) -> list[str]:
        def breaks_below_python(self: Engine, tokens: list[int], choices: object, steps: int = 1) -> list[list[int]]:
            wrong = where == "text" and bool((self.read_B == LENGTH + 5).any())
            if wrong:
                broken.append(f"{len(tokens)} lanes")
                if how == "hangs":
                    released.wait(60)
                if how == "raises":
                    raise RuntimeError("broken")
            bias_V = self.model.vocabulary.bias_V.data
            whole = bias_V.clone()
            if wrong and how == "no numbers":
                bias_V[0] = float("nan")
            try:
                return write(self, tokens, choices, steps)
            finally:
                bias_V.copy_(whole)

        def breaks(self: Engine, tokens_BT: torch.Tensor) -> torch.Tensor:
            if where == "prompt":
                wrong = tokens_BT.shape == (1, LENGTH)
            else:
                wrong = tokens_BT.shape[1] == 1 and bool((self.read_B == LENGTH + 5).any())
            if wrong:
                broken.append(f"{tokens_BT.shape[0]} lanes")
                if how == "hangs":
                    released.wait(60)
                if how == "raises":
                    raise RuntimeError("broken")
            hidden_BTD = read(self, tokens_BT)
            if wrong and how == "no numbers":
                lane = self.read_B == (LENGTH if where == "prompt" else LENGTH + 6)
                self.last_hidden_BD = self.last_hidden_BD.clone()
                self.last_hidden_BD[lane] = float("nan")
            return hidden_BTD

        monkeypatch.setattr(Engine, "read", breaks)
        monkeypatch.setattr(Engine, "write", breaks_below_python)
        return broken

    yield arm
    released.set()


@pytest.mark.parametrize("where", ["prompt", "text"])
@pytest.mark.parametrize(("how", "status"), [("raises", 500), ("no numbers", 500), ("hangs", 504)])
def test_w11_a_model_that_breaks_on_one_request_fails_that_one_alone(trained_run, breaking, how, status, where, caplog):
    caplog.set_level("CRITICAL")
    others = [{"prompt": "y" * (3 + 5 * number), "max_tokens": 60, "seed": number} for number in range(12)]
    with in_thread(trained_run, limits=Limits(patience_seconds=2.0, deadline_seconds=30)) as server:
        alone = [server.complete(**body) for body in others]
        broken = breaking(how, where)
        with ThreadPoolExecutor(13) as pool:
            first = [pool.submit(server.complete, **body) for body in others[:6]]
            bad = pool.submit(server.post, "/v1/completions", model="small", prompt="z" * LENGTH, max_tokens=40)
            second = [pool.submit(server.complete, **body) for body in others[6:]]
            started_at = time.monotonic()
            assert [one.result() for one in first + second] == alone
            answer = bad.result()
            seconds = time.monotonic() - started_at
        assert broken, "the model was never broken"
        assert answer.status_code == status
        assert "error" in answer.json()
        assert server.metric("in_flight") == 0
        assert server.metric("threads_abandoned_total") == (0 if how != "hangs" else 1 if where == "prompt" else 2)
        assert [server.complete(**body) for body in others] == alone
        print(f"W11: {how} in its {where}: {status} after {seconds:.1f} s, 12 others as alone; broken with {broken}")


def test_a_request_that_takes_too_long_is_answered_504_and_gives_its_place_back(trained_run):
    with in_thread(trained_run, limits=Limits(deadline_seconds=1, admitted=1)) as server:
        started_at = time.monotonic()
        answer = server.post("/v1/completions", model="small", prompt="x", max_tokens=16_384, n=1)
        assert answer.status_code == 504
        assert time.monotonic() - started_at < 3
        stream = server.post("/v1/completions", model="small", prompt="x", max_tokens=16_384, stream=True)
        assert '"code":504' in stream.text
        assert "[DONE]" not in stream.text
        assert server.complete("x")
