"""A folder replaced again and again by processes that end between two system calls. One process forks a child for each.

with replacements(folder) as replace:
    end = replace(Replacement(version=3, at_call=17, by="kill"))
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from transformer_xl import files

PARTS = ("manifest.txt", "deep/one.txt", "deep/deeper/two.txt", "other/three.txt")
NOT_REACHED = 3
NOT_COUNTED = {"fspath", "getpid", "kill", "_exit", "fork", "waitpid", "register_at_fork", "get_terminal_size"}


@dataclass(frozen=True, kw_only=True)
class Replacement:
    version: int
    at_call: int = 0
    """Before its so many-th system call; 0: never."""
    by: str = "kill"
    """kill, or a failing call (error), or Ctrl-C (interrupt)."""
    steps: bool = False
    """As where two names cannot change places in one call."""


@contextmanager
def replacements(target: Path) -> Iterator[Callable[[Replacement], int]]:
    """Answers with the exit code: -9 for SIGKILL, 1 for an error or Ctrl-C, NOT_REACHED where there were not so many calls."""
    with subprocess.Popen(
        [sys.executable, __file__, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:

        def replace(asked: Replacement) -> int:
            print(json.dumps(asdict(asked)), file=process.stdin, flush=True)
            return int(process.stdout.readline())

        yield replace


def write(target: Path, version: int) -> None:
    with files.atomic_folder(target) as folder:
        for part in PARTS:
            (folder / part).parent.mkdir(exist_ok=True)
            (folder / part).write_text(f"{version}", encoding="utf-8")


def version_of(target: Path) -> int:
    """Which one stands there; an error if it is not whole."""
    found = {str(path.relative_to(target)): path.read_text(encoding="utf-8") for path in target.rglob("*.txt")}
    assert found.keys() == set(PARTS)
    (version,) = set(found.values())
    return int(version)


# --- in the process that forks


def serve(target: Path) -> None:
    for line in sys.stdin:
        asked = Replacement(**json.loads(line))
        child = os.fork()
        if not child:
            os._exit(run(target, asked))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(target: Path, asked: Replacement) -> int:
    if asked.steps:
        files.exchange = lambda one, other: False
    reached = end_at_call(asked.at_call, asked.by) if asked.at_call else lambda: True
    try:
        write(target, asked.version)
    except (OSError, KeyboardInterrupt):
        return 1
    return 0 if reached() else NOT_REACHED


def end_at_call(number: int, by: str) -> Callable[[], bool]:
    import fcntl

    left = number
    kill, own = os.kill, os.getpid()

    def counted(call):
        def counting(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0 and by == "kill":
                kill(own, signal.SIGKILL)
            if left == 0 and by == "interrupt":
                raise KeyboardInterrupt
            if left == 0:
                raise OSError(5, os.strerror(5))
            return call(*arguments, **options)

        return counting

    for name, call in list(vars(os).items()):
        if isinstance(call, type(os.open)) and call.__module__ == "posix" and name not in NOT_COUNTED:
            setattr(os, name, counted(call))
    fcntl.flock = counted(fcntl.flock)
    if hasattr(files, "exchange"):
        files.exchange = counted(files.exchange)
    return lambda: left <= 0


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
