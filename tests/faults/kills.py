"""Commands killed again and again: one process loads what they need, once, and forks a child for each attempt.

with attempts("transformer_xl.training") as attempt:
    death = attempt(Attempt(words=["train", ...], at_write=7))
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A command, and how it is to die."""

    words: list[str]
    at_write: int = 0
    """By SIGKILL, at its so many-th call that puts a file on the disk or in its place; 0: at none."""
    in_saving: bool = False
    """Of a training: only the calls that save a checkpoint count."""
    after_seconds: float | None = None
    """By `number`, so long after it was ready."""
    number: int = signal.SIGKILL
    ready_at_step: int = 0
    """Of a training: ready when it takes its so many-th step; 0: ready when it starts."""


@dataclass(frozen=True, kw_only=True)
class Death:
    code: int
    """As subprocess has it: -9 for SIGKILL."""
    ready: bool
    """Whether it had been ready before."""
    seconds: float
    """Since it was killed from outside; else since it was ready."""
    said: str


@contextmanager
def attempts(*modules: str) -> Iterator[Callable[[Attempt], Death]]:
    """`modules`: imported before any attempt, where they are installed."""
    with subprocess.Popen(
        [sys.executable, __file__, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:

        def attempt(asked: Attempt) -> Death:
            print(json.dumps(asdict(asked)), file=process.stdin, flush=True)
            return Death(**json.loads(process.stdout.readline()))

        yield attempt


def random_writes(chance: random.Random, *, most: int, count: int) -> list[int]:
    """So many writes of 1 to `most`: each once before any comes twice."""
    drawn: list[int] = []
    while len(drawn) < count:
        drawn += chance.sample(range(1, most + 1), most)
    return drawn[:count]


def leftovers(folder: Path) -> int:
    """Files and folders under `folder` that were being written."""
    from transformer_xl.files import TEMPORARY

    inside = [path.relative_to(folder).parts for path in folder.rglob(f"{TEMPORARY}*")]
    return sum(not any(part.startswith(TEMPORARY) for part in parts[:-1]) for parts in inside)


# --- in the process that forks


def serve(modules: list[str]) -> None:
    for name in modules:
        with suppress(ImportError):
            import_module(name)
    for line in sys.stdin:
        asked = Attempt(**json.loads(line))
        with tempfile.TemporaryFile() as said:
            hearing, telling = os.pipe()
            child = os.fork()
            if not child:
                os.close(hearing)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(said.fileno(), 2)
                os._exit(run(asked, telling))
            os.close(telling)
            ready = os.read(hearing, 1) != b""
            if asked.after_seconds is not None:
                time.sleep(asked.after_seconds)
                os.kill(child, asked.number)
            begun = time.monotonic()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            seconds = time.monotonic() - begun
            os.close(hearing)
            said.seek(0)
            death = Death(code=code, ready=ready, seconds=seconds, said=said.read().decode(errors="replace"))
        print(json.dumps(asdict(death)), flush=True)


def run(asked: Attempt, telling: int) -> int:
    from transformer_xl.cli import main

    if asked.ready_at_step:
        ready_at_step(asked.ready_at_step, telling)
    else:
        os.write(telling, b"!")
    if asked.at_write:
        die_at_write(asked.at_write, in_saving=asked.in_saving)
    try:
        return main(asked.words)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


def ready_at_step(number: int, telling: int) -> None:
    from transformer_xl.training import loop

    take_step, taken = loop.take_step, 0

    def counting(*arguments, **options):
        nonlocal taken
        taken += 1
        if taken == number:
            os.write(telling, b"!")
        return take_step(*arguments, **options)

    loop.take_step = counting


def die_at_write(number: int, *, in_saving: bool) -> None:
    left = number

    def counted(call):
        def counting(*arguments, **options):
            nonlocal left
            left -= not in_saving or threading.current_thread().name == "saving"
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counting

    os.fsync, os.replace = counted(os.fsync), counted(os.replace)


if __name__ == "__main__":
    serve(sys.argv[1:])
