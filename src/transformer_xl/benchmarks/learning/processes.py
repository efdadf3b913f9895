"""A process for each run, one at a time, and whether others were busy meanwhile."""

import sys
import time
from pathlib import Path
from typing import Any

import torch

from transformer_xl.benchmarks.children import DISTURBED_SHARE, TICK_SECONDS, Child, busy_seconds, cores
from transformer_xl.benchmarks.environment import peers_python
from transformer_xl.benchmarks.learning.entrants import Entrant
from transformer_xl.benchmarks.measuring import processor_name

WORKERS = {
    kind: Path(__file__).with_name(f"{name}.py") for kind, name in (("ours", "our_worker"), ("peer", "peer_worker"))
}


def learn_in_a_process(entrant: Entrant, request: dict[str, Any]) -> dict[str, Any]:
    python = peers_python() if entrant.needs_packages else sys.executable
    threads = 1 if request["one_core"] else None
    child = Child(entrant.name, python=python, worker=WORKERS[entrant.kind], threads=threads)
    try:
        child.answer()
        busy_before, started_at = busy_seconds(), time.perf_counter()
        answer = child.ask("learn", **request)
        elapsed, busy_after = time.perf_counter() - started_at, busy_seconds()
    finally:
        child.end()
    others = 0.0
    if busy_before is not None and busy_after is not None:
        others = busy_after - busy_before - answer.pop("cpu_seconds")
    answer["others_busy"] = max(0.0, others) / (elapsed * cores())
    busy = others > DISTURBED_SHARE * elapsed * cores() + TICK_SECONDS
    answer["disturbed"] = (
        busy and not request["one_core"]
    )  # a process's own time does not run while others have the processor
    return answer


def machine_in_words() -> str:
    return f"{processor_name()}, {cores()} cores, torch {torch.__version__}"
