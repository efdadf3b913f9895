"""How fast the server is: one client, then many, each reading a stream of its own, and how long a long prompt waits for its first token.

A process serves a model drawn at random; the clients are tasks of this one. All streams of a turn begin before the clock does, and it stops before
the first of them ends: what is timed is writing alone.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from transformer_xl.benchmarks.children import BenchmarkError, Run, cores, spread, take_turns, watched
from transformer_xl.benchmarks.measuring import processor_name
from transformer_xl.benchmarks.workloads import Scale
from transformer_xl.checkpoint import About, write_checkpoint
from transformer_xl.config import ModelConfig
from transformer_xl.console import progress, say
from transformer_xl.data.text.tokenizers import ByteTokenizer
from transformer_xl.model import TransformerXL
from transformer_xl.presets import find_preset

STREAMS = 16
PROMPT_BYTES = 2_000
SECONDS_OF_A_TURN = {"full": 4.0, "tiny": 0.2}
PRESET = "enwik8-12l"
START_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class ServingRow:
    workload: str
    implementation: str
    tokens_per_second: float | None
    spread: tuple[float, float] | None
    ratio_to_one_stream: float | None
    ratio_to_one_stream_spread: tuple[float, float] | None
    first_token_seconds: float | None
    first_token_seconds_spread: tuple[float, float] | None
    peak_memory_mb: float
    disturbed_rounds: int


@dataclass(frozen=True, kw_only=True)
class ServingResult:
    scale: Scale
    rounds: int
    processor: str
    cores: int
    torch: str
    rows: list[ServingRow]

    def as_json(self) -> dict[str, Any]:
        return {"kind": "serving", **asdict(self)}


def shape(scale: Scale) -> ModelConfig:
    """The paper's 41M model with its memory as trained, for text of any bytes."""
    config = find_preset(PRESET).run.model
    assert isinstance(config, ModelConfig)
    config = replace(config, vocabulary=256, dropout=0.0)
    if scale == "full":
        return config
    return replace(config, n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64, memory=32)


@contextmanager
def server(scale: Scale) -> Iterator[tuple[int, int]]:
    """A server of its own: its port and process."""
    config = shape(scale)
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory(prefix="txl-bench-") as name:
        torch.manual_seed(0)
        model = TransformerXL(config)
        run = replace(find_preset(PRESET).run, model=config)
        about = About(corpus="none", rule="none", unit="bits_per_byte", data="", step=0)
        folder, told = Path(name) / "random", Path(name) / "told"
        weights, tokenizer = model.state_dict(), ByteTokenizer(bytes(range(256)))
        write_checkpoint(folder, config=run, about=about, weights=weights, tokenizer=tokenizer)
        command = [sys.executable, "-m", "transformer_xl", "serve", str(folder), "--port", "0", "--deadline", "600"]
        with told.open("w", encoding="utf-8") as stderr:
            process = subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL, env=_environment())
        try:
            yield _port(process, told), process.pid
        finally:
            process.terminate()
            process.wait(30)


def _environment() -> dict[str, str]:
    """Without a key from outside, and with the package that this process has."""
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    known = {name: value for name, value in os.environ.items() if name != "TXL_API_KEY"}
    return {**known, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(torch.get_num_threads())}


def _port(process: "subprocess.Popen[bytes]", told: Path) -> int:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        if " at http://127.0.0.1:" in (text := told.read_text(encoding="utf-8")):
            return int(text.rsplit(":", 1)[1])
        time.sleep(0.05)
    last = told.read_text(encoding="utf-8").strip().splitlines()[-1:] or ["it said nothing"]
    raise BenchmarkError(f"the server did not start: {last[0]}")


class Stream:
    """One client: asks for a text and reads it as it comes."""

    def __init__(self, port: int, *, prompt: str, tokens: int, seed: int) -> None:
        self._port = port
        asked = {"model": "random", "prompt": prompt, "max_tokens": tokens, "seed": seed, "stream": True}
        self._body = json.dumps(asked).encode()

    async def start(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(self._body)}\r\n\r\n"
        self._writer.write(head.encode() + self._body)
        status = await self._reader.readuntil(b"\r\n\r\n")
        if not status.startswith(b"HTTP/1.1 200"):
            raise BenchmarkError(f"the server answered {status.split(None, 2)[1].decode()}")

    async def token(self) -> None:
        """Waits for one more."""
        while not (await self._reader.readline()).startswith(b"data: "):
            if self._reader.at_eof():
                raise BenchmarkError("a stream ended before its time")

    def stop(self) -> None:
        self._writer.close()


async def _write(port: int, *, streams: int, seconds: float) -> tuple[int, float]:
    """Tokens that so many streams get in about `seconds`, and the exact time."""
    clients = [Stream(port, prompt=f"{number} is a number", tokens=16_000, seed=number) for number in range(streams)]
    for client in clients:
        await client.start()
    for client in clients:
        await client.token()
    started_at, counts = time.perf_counter(), [0] * streams

    async def read(number: int) -> None:
        while True:
            await clients[number].token()
            counts[number] += 1

    tasks = [asyncio.create_task(read(number)) for number in range(streams)]
    done, _ = await asyncio.wait(tasks, timeout=seconds)
    elapsed, tokens = time.perf_counter() - started_at, sum(counts)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for client in clients:
        client.stop()
    for task in done:
        task.result()
    await asyncio.sleep(0.5)  # the server lets go of them
    return tokens, elapsed


async def _first_token(port: int, *, prompt: str) -> float:
    client = Stream(port, prompt=prompt, tokens=2, seed=0)
    started_at = time.perf_counter()
    await client.start()
    await client.token()
    seconds = time.perf_counter() - started_at
    client.stop()
    return seconds


def measure_serving(*, scale: Scale, rounds: int) -> ServingResult:
    if not Path("/proc/self/stat").exists():
        raise BenchmarkError(
            "serving: the server's time and memory are read from /proc, which only Linux has; take another benchmark"
        )
    prompt = "It was a bright cold day in April, and the clocks were striking thirteen. " * 30
    firsts: list[float] = []
    with server(scale) as (port, pid), progress("bench serving", total=rounds, unit="rounds") as advance:

        def writing(streams: int) -> Run:
            return _timed(pid, lambda: asyncio.run(_write(port, streams=streams, seconds=SECONDS_OF_A_TURN[scale])))

        def waiting() -> Run:
            def once() -> tuple[int, float]:
                firsts.append(asyncio.run(_first_token(port, prompt=prompt[:PROMPT_BYTES])))
                return 1, firsts[-1]

            return _timed(pid, once)

        asyncio.run(_first_token(port, prompt=prompt[:PROMPT_BYTES]))  # warms up
        turns = {"one": lambda: writing(1), "many": lambda: writing(STREAMS), "first": waiting}
        found = take_turns(turns, rounds=rounds, advance=advance)
    if found.disturbed:
        say(f"other processes were busy in {found.disturbed} of {rounds} rounds; run it again on a quiet machine")

    def row(who: str, implementation: str) -> ServingRow:
        seconds = [runs[who].seconds for runs in found.runs] if who == "first" else None
        speed = None if seconds else spread(found.speeds(who))
        ratio = spread(found.ratios(who, "one")) if who == "many" else None
        first = spread(seconds) if seconds else None
        return ServingRow(
            workload=name,
            implementation=implementation,
            tokens_per_second=speed[0] if speed else None,
            spread=speed[1:] if speed else None,
            ratio_to_one_stream=ratio[0] if ratio else None,
            ratio_to_one_stream_spread=ratio[1:] if ratio else None,
            first_token_seconds=first[0] if first else None,
            first_token_seconds_spread=first[1:] if first else None,
            peak_memory_mb=found.peak_memory_mb(who),
            disturbed_rounds=found.disturbed,
        )

    config = shape(scale)
    name = f"serve {'41M enwik8' if scale == 'full' else 'tiny'} shape, memory {config.memory}"
    rows = [
        row("one", "1 stream"),
        row("many", f"{STREAMS} streams"),
        row("first", f"first token after {PROMPT_BYTES} bytes"),
    ]
    return ServingResult(
        scale=scale, rounds=rounds, processor=processor_name(), cores=cores(), torch=torch.__version__, rows=rows
    )


def _timed(pid: int, work: Callable[[], tuple[int, float]]) -> Run:
    """With what the server and this process spent taken out of what the machine was busy with: the rest is others'."""

    def told() -> dict[str, float]:
        before, (tokens, seconds) = _spent(pid), work()
        spent, memory = _spent(pid) - before, _memory_mb(pid)
        both = {"memory_mb": memory, "peak_memory_mb": memory}
        return {"tokens": tokens, "seconds": seconds, "cpu_seconds": spent, **both}

    return watched(told)


def _spent(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM"))
