"""Two ranks as people start them: torchrun on gloo, its processes found and killed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.config import RunConfig
from transformer_xl.data.store import Store
from transformer_xl.files import TEMPORARY

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


RANDOM = replace(
    SMALL,
    model=replace(SMALL.model, dropout=0.2, locked_dropout=("embedding", "output")),
    training=replace(
        SMALL.training,
        accumulation=2,
        variable_segments=True,
        average="ema",
        steps=120,
        save_every=10,
        validate_every=0,
    ),
)
"""All that draws random numbers."""


def command(config: RunConfig, store: Store, folder: Path, *more: str) -> list[str]:
    file = folder.parent / f"{folder.name}.json"
    file.write_text(json.dumps(asdict(config)))
    return ["transformer_xl", "train", str(file), "--data", str(store.folder), "--run", str(folder), *more]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def launch(*words, launcher: list[str] = TORCHRUN) -> subprocess.CompletedProcess:
    together = [*launcher, "-m", "--", *command(*words)] if launcher is TORCHRUN else [*launcher, *command(*words)]
    return subprocess.run(together, env=environment(), capture_output=True, text=True)


def checkpoint_of(folder: Path) -> Path:
    run = RunFolder(folder)
    return run.checkpoint_at(run.steps()[-1])


def final_bytes(folder: Path) -> list[bytes]:
    return [(checkpoint_of(folder) / name).read_bytes() for name in ("model.safetensors", "training.safetensors")]


def wait_for(found, process: subprocess.Popen, said: Path) -> None:
    while not found():
        assert process.poll() is None, said.read_text()
        time.sleep(0.002)


def children_of(process: subprocess.Popen) -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()}


def train_with_killed_ranks(store: Store, folder: Path, *, ranks: list[int]) -> list[int]:
    """RANDOM on two ranks of which these die by SIGKILL, one after the other, each while a checkpoint is being written beside training, once one was written;
    the steps that it went on from."""
    run, said = RunFolder(folder), folder.parent / f"{folder.name}.said"
    launcher = [*TORCHRUN, "--max-restarts", str(len(ranks) + 1), "-m", "--"]

    def resumes() -> list[int]:
        lines = said.read_text().splitlines()
        return [int(line.split()[4]) for line in lines if line.startswith("going on from step")]

    with (
        said.open("w") as stderr,
        subprocess.Popen(
            [*launcher, *command(RANDOM, store, folder)],
            env=environment(),
            stderr=stderr,
            stdout=subprocess.DEVNULL,
        ) as process,
    ):
        for number, rank in enumerate(ranks):
            wait_for(lambda number=number: len(resumes()) == number, process, said)
            from_step = max(run.steps(), default=0)
            wait_for(lambda from_step=from_step: max(run.steps(), default=0) > from_step, process, said)
            wait_for(lambda: any(run.checkpoints.glob(f"{TEMPORARY}*")), process, said)
            first = int(run.lock.read_text())  # rank 0, who holds the lock
            (second,) = children_of(process) - {first}
            os.kill(second if rank else first, signal.SIGKILL)
        assert process.wait() == 0, said.read_text()
    return resumes()
