"""Servers to talk to: one in a thread of this process, whose inside a test can reach, or one in a process of its own."""

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx

from transformer_xl.library import load
from transformer_xl.serving.api.app import make_app
from transformer_xl.serving.api.models import Served
from transformer_xl.serving.http.server import Server, make_server
from transformer_xl.serving.limits import Limits

JSON = {"Content-Type": "application/json"}


@dataclass
class Running:
    address: str
    server: Server | None = None
    process: subprocess.Popen[str] | None = None
    errors: Path | None = None
    models: list[str] = field(default_factory=list)
    key: str | None = None

    @property
    def port(self) -> int:
        return int(self.address.rsplit(":", 1)[1])

    def client(self, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.Client(
            base_url=self.address, timeout=60, trust_env=False, verify=False, headers=headers, **options
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def complete(self, prompt: Any, **body: Any) -> str:
        answer = self.post("/v1/completions", model=self.models[0], prompt=prompt, **body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def metric(self, name: str) -> float:
        """Summed over its labels."""
        lines = self.get("/metrics").text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"txl_{name} ", f"txl_{name}{{"))
        )

    def raw(self, data: bytes, *, seconds: float = 30.0) -> bytes:
        """What comes back for these bytes until the connection closes or nothing more comes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            found = b""
            try:
                connection.sendall(data)
                while part := connection.recv(65536):
                    found += part
                    head, _, body = found.partition(b"\r\n\r\n")
                    length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                    if length and len(body) >= int(length[0].split(b":")[1]):
                        break
            except (TimeoutError, ConnectionError):
                pass
            return found


@contextmanager
def in_thread(
    *runs: Path, limits: Limits | None = None, key: str | None = None, memory: int | None = None, **options: Any
) -> Iterator[Running]:
    limits = limits or Limits()
    models = [Served(run.name, load(run, memory=memory).checkpoint, limits=limits) for run in runs]
    server = make_server(make_app(models, limits=limits, key=key, **options), limits=limits)
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        yield Running(address, server=server, models=[served.name for served in models], key=key)
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()
        assert not thread.is_alive()


@contextmanager
def in_process(
    *runs: Path,
    folder: Path,
    options: tuple[str, ...] = (),
    threads: int = 1,
    files: int | None = None,
    program: tuple[str, ...] = ("-m", "transformer_xl", "serve"),
) -> Iterator[Running]:
    """`files`: how many it may open."""
    errors = folder / "stderr.txt"
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, *program, *map(str, runs), "--port", "0", *options]
    with errors.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL, text=True, env=environment)
    if files is not None:  # before it has come as far as to ask
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))
    try:
        address = ""
        for _ in range(1200):
            told = errors.read_text()
            if " at http" in told:
                address = told.split(" at ")[-1].strip()
                break
            assert process.poll() is None, told
            time.sleep(0.05)
        running = Running(address, process=process, errors=errors, models=[run.name for run in runs])
        for _ in range(400):
            try:
                running.get("/health")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def p95(client: httpx.Client, over: Callable[[], bool]) -> float:
    """Of how long an honest client waits for a short text, asking at least a hundred times and until it is over."""
    taken: list[float] = []
    while len(taken) < 100 or not over():
        started_at = time.monotonic()
        assert client.post("/v1/completions", json={"model": "small", "prompt": "x", "max_tokens": 8}).is_success
        taken.append(time.monotonic() - started_at)
        time.sleep(0.01)
    return quantiles(taken, n=20)[18]


def events(text: str) -> list[dict[str, Any]]:
    """Of a stream that ended well."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
