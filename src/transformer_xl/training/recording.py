"""What a run leaves for people and programs to read: metrics.jsonl, TensorBoard events, the live line."""

import contextlib
import json
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl import __version__
from transformer_xl.checkpoint import RunFolder
from transformer_xl.console import say
from transformer_xl.files import open_plain, write_json, write_text
from transformer_xl.training.ranks import Ranks
from transformer_xl.training.tracking import Tracking

if TYPE_CHECKING:
    import torch


class Metrics:
    """metrics.jsonl, one JSON object a line, and the same as TensorBoard events where tensorboard is installed, and for trackers. Written by rank 0."""

    def __init__(self, run: RunFolder, *, from_step: int, ranks: Ranks, tracking: Tracking | None = None) -> None:
        self.path = run.metrics
        self._tracking = tracking
        self._writing = ranks.first
        self._events: Any = None
        if not self._writing:
            return
        # Lines of steps that a resumed run will take again are dropped: each step stands there once.
        kept = [line for line in read_metrics(run.metrics) if line["step"] <= from_step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard.writer import SummaryWriter

            try:
                self._events = SummaryWriter(str(run.tensorboard), purge_step=from_step + 1)
            except UnicodeEncodeError:
                say(
                    f"TensorBoard cannot write to {run.tensorboard} under this locale; metrics.jsonl has the same figures"
                )

    def write(self, kind: str, *, step: int, **values: float) -> None:
        if not self._writing:
            return
        with open_plain(self.path, "a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(f"{kind}/{name}", value, step)
        if self._tracking is not None:
            self._tracking.log(kind, values, step=step)

    def close(self) -> None:
        if self._tracking is not None:
            self._tracking.close()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that are whole; a killed run may leave half a line at the end."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def write_environment(run: RunFolder, *, command: str, ranks: Ranks) -> None:
    """On what, and by which words, this run was made. Written by rank 0."""
    if not ranks.first:
        return
    import numpy
    import torch

    facts = {
        "command": command,
        "transformer_xl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "ranks": ranks.count,
        "parallel": ranks.parallel,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    write_json(run.environment, facts)


def peak_memory_mb(device: "torch.device") -> float:
    """The most that was taken of the device's memory, or of the host's where a processor computes. 0 where the system does not tell."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    if device.type == "mps":  # which tells what is taken now
        return torch.mps.driver_allocated_memory() / 1e6
    if find_spec("resource") is None:  # Windows
        return 0.0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3
