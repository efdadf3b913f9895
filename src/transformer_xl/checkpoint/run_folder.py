"""A run is a folder, always the same. Where everything in it lies; knows no content.

RUN/config.json environment.json metrics.jsonl README.md adapter.safetensors adaptation.json adaptation.safetensors tensorboard/
    checkpoints/step-00001000/ ... best.json
    evaluations/ samples/ figures/
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from transformer_xl.errors import CheckpointError
from transformer_xl.files import clear_leftovers, open_plain, put_back_all, remove_folder, strange_file, write_json

STEP_FOLDER = re.compile(r"step-(\d{8,18})")
"""No step has more digits: training.steps is far below, and a name may be as long as somebody likes."""
ADAPTATION, GRADIENT_SIZES = "adaptation.json", "adaptation.safetensors"
"""In a run that was tuned to learn while it reads: how, and how large gradients are on its training text."""
ADAPTER_FILE = "adapter.safetensors"
"""In a run: that of the checkpoint to use, for whoever takes it elsewhere."""
FILLING = ("evaluations", "samples", "figures")
"""Folders that fill up as a run is used."""


class RunFolder:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config, self.environment = self.path / "config.json", self.path / "environment.json"
        self.metrics, self.card = self.path / "metrics.jsonl", self.path / "README.md"
        self.tensorboard, self.checkpoints = self.path / "tensorboard", self.path / "checkpoints"
        self.lock, self.adapter = self.path / "lock", self.path / ADAPTER_FILE

    def made(self, name: str) -> Path:
        """One of FILLING, or a folder like them."""
        folder = self.inside(name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def inside(self, *names: str) -> Path:
        """A place in the run to write to. The run itself may be a link; within it, none is followed out of it."""
        place = self.path.joinpath(*names)
        self._refuse_links([*reversed(place.parents[: len(names) - 1]), place])
        return place

    def refuse_links(self) -> None:
        """For who is about to write all over it: better now than after an hour of training."""
        files = (self.lock, self.config, self.environment, self.metrics, self.card, self.adapter)
        folders = (self.checkpoints, self.tensorboard, *(self.path / name for name in FILLING))
        self._refuse_links([*files, *folders])
        for folder in folders:
            if folder.is_dir():
                self._refuse_links(sorted(folder.iterdir()))

    def refuse_name(self) -> None:
        """safetensors writes to any path, and reads back none that is not UTF-8."""
        try:
            os.fsencode(self.path).decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{self.path} is no UTF-8, and what is saved under such a name could not be read again; choose another `run=`"
            ) from None

    def _refuse_links(self, paths: Iterable[Path]) -> None:
        strange = strange_file(paths)
        if strange is not None:
            kind = "a symbolic link" if strange.is_symlink() else "neither a file nor a folder"
            raise CheckpointError(
                f"{strange} is {kind}, and nothing in a run is written through one; remove it (the run as a whole may be a link)"
            )

    def checkpoint_at(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        put_back_all(self.checkpoints)
        names = {path.name for path in self.checkpoints.iterdir() if path.is_dir()}
        found = (int(match[1]) for match in map(STEP_FOLDER.fullmatch, names) if match)
        # A step has one name: with more zeros, or other digits than ours, it is somebody's copy.
        return sorted({step for step in found if self.checkpoint_at(step).name in names})

    def best_step(self) -> int | None:
        """The step with the lowest validation loss so far, where one was measured and is still here."""
        try:
            with open_plain(self.checkpoints / "best.json", "r") as file:
                step = json.load(file)["step"]
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return step if type(step) is int and step in self.steps() else None

    def set_best(self, step: int, *, loss_nats: float) -> None:
        write_json(self.checkpoints / "best.json", {"step": step, "loss_nats": loss_nats})

    def prune(self, *, keep: int) -> None:
        """Removes all checkpoints but the newest `keep` and the best."""
        best = self.best_step()
        for step in self.steps()[:-keep]:
            if step != best:
                remove_folder(self.checkpoint_at(step))

    def forget_checkpoints(self) -> None:
        """Removes them all, for a run that begins again."""
        for step in self.steps():
            remove_folder(self.checkpoint_at(step))
        self.inside("checkpoints", "best.json").unlink(missing_ok=True)

    def clear_half_written(self) -> None:
        """Removes what a killed trainer was writing: it can be as large as a checkpoint."""
        for folder in (self.path, self.checkpoints):
            clear_leftovers(folder)

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
