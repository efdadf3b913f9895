"""What a run is and came to, read from its folder without loading the model: for lists of runs and for their curves."""

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_xl.checkpoint import RunFolder
from transformer_xl.checkpoint.folder import WEIGHTS, read_about, read_config
from transformer_xl.checkpoint.shards import reading_whole_or_shards
from transformer_xl.errors import CheckpointError, TransformerXLError
from transformer_xl.training.recording import read_metrics

LARGEST_METRICS = 1 << 28
"""Bytes; a run of a million steps that writes every tenth has a tenth of it."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    folder: str
    shape: str = ""
    parameters: int = 0
    step: int = 0
    """Of the newest checkpoint."""
    steps: int = 0
    """That it was to take."""
    minutes: float | None = None
    """In steps; None where nothing was written down, as of a model that came from elsewhere."""
    best: float | None = None
    """Of its validations, in the unit of its corpus."""
    unit: str = ""
    data: str = ""
    changed: str = ""
    """When it last wrote, in local time."""
    problem: str | None = None
    """Why it cannot be read."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Bits per byte as a run went on."""

    steps: NDArray[np.float64]
    minutes: NDArray[np.float64]
    bits: NDArray[np.float64]


def find_runs(place: Path) -> Iterator[Path]:
    """The runs in a folder and in the folders in it; a run itself is one. Links to folders are not followed."""
    for here, folders, files in os.walk(place):
        folders.sort()
        if "config.json" in files and "checkpoints" in folders:
            folders[:] = []
            yield Path(here)
        folders[:] = [name for name in folders if not name.startswith(".")]


def summarise(folder: Path) -> RunSummary:
    """What can be said of it; one that is damaged says so."""
    try:
        return _summary(RunFolder(folder))
    except (TransformerXLError, OSError) as error:
        return RunSummary(folder=str(folder), problem=str(error))


def _summary(run: RunFolder) -> RunSummary:
    chosen = run.chosen_checkpoint()
    config, about = read_config(chosen / "config.json"), read_about(chosen / "about.json")
    with reading_whole_or_shards(chosen / "model.safetensors", what=WEIGHTS) as file:
        parameters = sum(prod(kind.shape) for kind in file.kinds.values())
    lines = metric_lines(run)
    seconds = [line["seconds"] for line in lines if line["kind"] == "train" and "seconds" in line]
    newest = max(
        path.stat().st_mtime for path in (chosen / "about.json", run.metrics, run.checkpoints) if path.exists()
    )
    return RunSummary(
        folder=str(run.path),
        shape=config.model.in_words.shape,
        parameters=parameters,
        step=max(run.steps(), default=about.step),
        steps=config.training.steps,
        minutes=seconds[-1] / 60 if seconds else None,
        best=_best(lines, unit=about.unit, told=about.validation_nats),
        unit=about.unit,
        data=about.corpus,
        changed=datetime.fromtimestamp(newest).isoformat(sep=" ", timespec="minutes"),
    )


def _best(lines: list[dict[str, Any]], *, unit: str, told: float | None) -> float | None:
    """Of what was written down; of a model that came without, what it says itself, where its unit allows that."""
    validations = [line for line in lines if line["kind"] == "validation" and "loss_nats" in line]
    best = min(validations, key=lambda line: float(line["loss_nats"]), default=None)
    nats = told if best is None else float(best["loss_nats"])
    if unit == "bits_per_byte":
        return None if best is None else best.get("bits_per_byte")
    if nats is None:
        return None
    return math.exp(min(nats, 700.0)) if unit == "perplexity_per_word" else nats / math.log(2)


def metric_lines(run: RunFolder) -> list[dict[str, Any]]:
    """Those that are what a run writes: a kind, a step and finite numbers. Whatever else stands there is left out."""
    if run.metrics.is_file() and run.metrics.stat().st_size > LARGEST_METRICS:
        raise CheckpointError(f"{run.metrics} has more than {LARGEST_METRICS:,} bytes, which none of ours has")
    found = []
    for line in read_metrics(run.metrics):
        if isinstance(line, dict) and isinstance(line.get("kind"), str) and type(line.get("step")) is int:
            numbers = {name: value for name, value in line.items() if _is_number(value)}
            found.append({**numbers, "kind": line["kind"]})
    return found


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # type: ignore[arg-type]


def curves_of(run: RunFolder) -> dict[str, Curve]:
    """ "train" and "validation", each without points where nothing was measured. What training writes down is per token: validation knows both."""
    lines = [line for line in metric_lines(run) if "loss_nats" in line]
    trained = [line for line in lines if line["kind"] == "train" and "seconds" in line]
    validated = [line for line in lines if line["kind"] == "validation" and "bits_per_byte" in line]
    per_token = [line["bits_per_byte"] / line["loss_nats"] for line in validated if line["loss_nats"]]
    times = np.array([(0, 0.0), *sorted((line["step"], line["seconds"]) for line in trained)], dtype=np.float64)

    def curve(points: list[tuple[float, float]]) -> Curve:
        step_bits = np.array(sorted(points), dtype=np.float64).reshape(-1, 2)
        minutes = np.interp(step_bits[:, 0], times[:, 0], times[:, 1]) / 60
        return Curve(steps=step_bits[:, 0], minutes=minutes, bits=step_bits[:, 1])

    return {
        "train": curve([(line["step"], line["loss_nats"] * per_token[-1]) for line in trained if per_token]),
        "validation": curve([(line["step"], line["bits_per_byte"]) for line in validated]),
    }
