"""Many cases of one kind, each of which must end well: tried in forked children with limits, so that a crash, a hang, a traceback or a request for
too much memory is seen, and belongs to its case.

pytest -> one process that loads everything and sets the limits -> a child for every few hundred cases; after a death, another from the next case on
"""

import json
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

LONGEST_SECONDS = 5
"""Of processor time for one case; then the kernel ends the child, wherever it is."""
MEMORY_BYTES = 4 << 30
CASES_OF_A_CHILD = 250
Case = Callable[[random.Random], str]
"""Tries something made by chance and says in a word how it ended. What it raises is a failure."""


def run_campaign(make: str, *arguments: Path | str, seed: int, count: int) -> dict[str, float]:
    """`make` names a function of `mutated_files` that takes the arguments and returns a Case. How many ended in which word, and the slowest."""
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    told = json.dumps({"make": make, "arguments": [str(one) for one in arguments], "seed": seed, "count": count})
    program = "import sys; sys.path[:0] = sys.argv[2:]; import campaign; campaign.main(sys.argv[1])"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, told, *here, *sys.path]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-4000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert not found.pop("failures"), answer.stdout[-2000:] + answer.stderr[-4000:]
    assert sum(found["outcomes"].values()) == count
    print(f"{make}: {found}")
    return {**found["outcomes"], "slowest_seconds": found["slowest_seconds"]}


def main(told: str) -> None:
    import mutated_files
    import torch

    torch.set_num_threads(1)
    asked = json.loads(told)
    case = getattr(mutated_files, asked["make"])(*asked["arguments"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print(json.dumps(try_all(case, seed=asked["seed"], count=asked["count"])))


def try_all(case: Case, *, seed: int, count: int) -> dict[str, object]:
    board = Board()
    failures: list[str] = []
    next_case, outcomes, slowest = board.read()
    while next_case < count and len(failures) < 5:
        last = min(count, next_case + CASES_OF_A_CHILD)
        child = os.fork()
        if not child:
            _be_child(case, board, seed=seed, numbers=range(next_case, last))
        _, status = os.waitpid(child, 0)
        next_case, outcomes, slowest = board.read()
        if status:
            how = f"signal {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "an exception"
            failures.append(f"case {next_case} of seed {seed}: {how}")
            next_case += 1
    return {"outcomes": outcomes, "slowest_seconds": slowest, "failures": failures}


class Board:
    """What a child writes down and the parent reads, also when the child is dead: which case is under way, and how the others ended."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1 << 12)
        self.write(current=0, outcomes={}, slowest=0.0)

    def write(self, *, current: int, outcomes: dict[str, int], slowest: float) -> None:
        text = json.dumps([current, outcomes, slowest]).encode()
        self._shared[: 4 + len(text)] = len(text).to_bytes(4, "little") + text

    def read(self) -> tuple[int, dict[str, int], float]:
        size = int.from_bytes(self._shared[:4], "little")
        current, outcomes, slowest = json.loads(self._shared[4 : 4 + size])
        return current, outcomes, slowest


def _be_child(case: Case, board: Board, *, seed: int, numbers: range) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _, outcomes, slowest = board.read()
    counted = Counter(outcomes)
    for number in numbers:
        board.write(current=number, outcomes=counted, slowest=slowest)
        begun = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, LONGEST_SECONDS)
        try:
            counted[case(random.Random(f"{seed}-{number}"))] += 1
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, round(time.process_time() - begun, 3))
    board.write(current=numbers.stop, outcomes=counted, slowest=slowest)
    sys.stdout.flush()
    os._exit(0)
