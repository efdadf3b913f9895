"""Processes that wait until they are asked, and the turns they take. Exactly one works at a time; the others sleep on their pipes.

round 1   exact . int8 . huggingface      ratios are taken within a round: what slows the machine down for a minute
round 2   int8 . huggingface . exact      slows all of them
...                                       a round in which other processes were busy is run again
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from transformer_xl.data.corpora.dealing import cores as cores
from transformer_xl.errors import TransformerXLError

WORKER = Path(__file__).with_name("worker.py")
DISTURBED_SHARE = 0.05
"""Of the machine's time, spent by processes that are not ours: a round with more is not believed."""
TICK_SECONDS = 0.05
"""What the kernel's count of busy time, which goes in ticks, may be wrong by."""


class BenchmarkError(TransformerXLError):
    """A comparison that cannot be made, or would not be honest."""


class Child:
    """One worker process."""

    def __init__(
        self,
        name: str,
        *,
        python: Path | str = sys.executable,
        worker: Path = WORKER,
        source: Path | None = None,
        threads: int | None = None,
    ) -> None:
        """`source`: where to import this software from, if not from here. `threads`: all cores if None."""
        count = str(cores() if threads is None else threads)
        self.name = name
        self._complaints = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115, it lives as long as the process
        # -P: the worker's own folder is no place to import from, nor is our path one for another interpreter. No library asks the network for news.
        lent = ("PYTHONPATH",) if str(python) != sys.executable else ()
        environment = {name: value for name, value in os.environ.items() if name not in lent}
        environment |= {"OMP_NUM_THREADS": count, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        environment |= {} if source is None else {"PYTHONPATH": str(source)}
        self._process = subprocess.Popen(
            [str(python), "-P", "-W", "ignore", str(worker), name, count],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            encoding="utf-8",
            errors="replace",
            env=environment,
        )

    def ask(self, do: str, **request: object) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """What it says next; the first answer, which nobody asks for, is that it is ready."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._complaints):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a question that nobody was there to read
                pipe.close()

    def _died(self) -> BenchmarkError:
        self._process.wait()
        self._complaints.seek(0)
        lines = self._complaints.read().strip().splitlines()
        return BenchmarkError(f"the process of {self.name} ended: {lines[-1] if lines else 'it said nothing'}")


def ready_children(
    pythons: Mapping[str, Path | str], *, names: Mapping[str, str]
) -> AbstractContextManager[dict[str, Child]]:
    """A ready child for each key, running the implementation that `names` gives; all are ended at the end."""
    chosen = {key: pythons.get(name, sys.executable) for key, name in names.items()}
    return all_ready({key: partial(Child, names[key], python=python) for key, python in chosen.items()})


@contextmanager
def all_ready(starts: Mapping[str, Callable[[], Child]]) -> Iterator[dict[str, Child]]:
    started: dict[str, Child] = {}
    try:
        for key, start in starts.items():
            started[key] = start()
        for child in started.values():
            child.answer()
        yield started
    finally:
        for child in started.values():
            child.end()


# --- turns


@dataclass(frozen=True, kw_only=True)
class Run:
    tokens: int
    seconds: float
    memory_mb: float
    peak_memory_mb: float
    disturbed: bool

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


Turn = Callable[[], Run]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    runs: list[dict[str, Run]]
    """For each round, by who ran."""
    repeated: int
    """Rounds thrown away because others were busy."""

    @property
    def disturbed(self) -> int:
        """Rounds kept although others were busy, for want of better ones."""
        return sum(any(run.disturbed for run in runs.values()) for runs in self.runs)

    def speeds(self, who: str) -> list[float]:
        return [runs[who].tokens_per_second for runs in self.runs]

    def ratios(self, who: str, to: str) -> list[float]:
        return [runs[who].tokens_per_second / runs[to].tokens_per_second for runs in self.runs]

    def peak_memory_mb(self, who: str) -> float:
        return max(runs[who].peak_memory_mb for runs in self.runs)


def take_turns(turns: Mapping[str, Turn], *, rounds: int, advance: Callable[[], None]) -> Rounds:
    """`rounds` rounds, each starting with another; a disturbed one is run again, as often as there are rounds in all."""
    names, repeated = list(turns), 0
    kept: list[dict[str, Run]] = []
    while len(kept) < rounds:
        first = len(kept) % len(names)
        runs = {name: turns[name]() for name in names[first:] + names[:first]}
        if repeated < rounds and any(run.disturbed for run in runs.values()):
            repeated += 1
            continue
        kept.append(runs)
        advance()
    return Rounds(runs=kept, repeated=repeated)


def timed(child: Child, *, mode: str, steps: int) -> Run:
    return watched(lambda: child.ask("run", mode=mode, steps=steps))


def watched(work: Callable[[], dict[str, Any]]) -> Run:
    """`work` tells the fields of its run, and `cpu_seconds` that it spent: what else the machine was busy with is others'."""
    busy_before, started_at = busy_seconds(), time.perf_counter()
    told = work()
    elapsed, busy_after, others = time.perf_counter() - started_at, busy_seconds(), -told.pop("cpu_seconds")
    if busy_before is not None and busy_after is not None:
        others += busy_after - busy_before
    return Run(**told, disturbed=others > DISTURBED_SHARE * elapsed * cores() + TICK_SECONDS)


def busy_seconds() -> float | None:
    """Processor time that the whole machine has spent since it started, or that was taken from it; None where the kernel does not tell."""
    try:
        first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = map(int, first[1:9])
    ticks = user + nice + system + interrupts + soft_interrupts + stolen
    return ticks / os.sysconf("SC_CLK_TCK")


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return median(values), min(values), max(values)
