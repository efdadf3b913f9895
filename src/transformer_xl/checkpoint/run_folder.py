"""A run is a folder, always the same. Where everything in it lies; knows no content.

RUN/config.json environment.json metrics.jsonl README.md tensorboard/
    checkpoints/step-00001000/ ... best.json
    evaluations/ samples/ figures/
"""

import json
import re
import shutil
from pathlib import Path

from transformer_xl.errors import CheckpointError
from transformer_xl.files import TEMPORARY, write_json

STEP_FOLDER = re.compile(r"step-(\d{8,})")


class RunFolder:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def card(self) -> Path:
        return self.path / "README.md"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    def made(self, name: str) -> Path:
        """One of the folders that fill up as a run is used: evaluations, samples, figures."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def checkpoint_at(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        matches = (STEP_FOLDER.fullmatch(path.name) for path in self.checkpoints.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def best_step(self) -> int | None:
        """The step with the lowest validation loss so far, where one was measured and is still here."""
        try:
            step = json.loads((self.checkpoints / "best.json").read_text())["step"]
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return step if step in self.steps() else None

    def set_best(self, step: int, *, loss_nats: float) -> None:
        write_json(self.checkpoints / "best.json", {"step": step, "loss_nats": loss_nats})

    def prune(self, *, keep: int) -> None:
        """Removes all checkpoints but the newest `keep` and the best."""
        best = self.best_step()
        for step in self.steps()[:-keep]:
            if step != best:
                shutil.rmtree(self.checkpoint_at(step))

    def clear_half_written(self) -> None:
        """Removes what a killed trainer was writing: it can be as large as a checkpoint. For who holds the run's lock."""
        for path in [*self.path.glob(f"{TEMPORARY}*"), *self.checkpoints.glob(f"{TEMPORARY}*")]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def chosen_checkpoint(self) -> Path:
        """The one to use: the best by validation, else the newest."""
        if not self.path.exists():
            raise CheckpointError(
                f"there is no run {self.path}; train one with: txl train PRESET --data DIR --run {self.path}"
            )
        step = self.best_step()
        if step is None:
            steps = self.steps()
            if not steps:
                raise CheckpointError(f"{self.path} holds no checkpoint; train it, or name the folder of a checkpoint")
            step = steps[-1]
        return self.checkpoint_at(step)
