"""What exact resuming needs beside the weights to use: tensors (training.safetensors) and counters (training.json). Whoever saves such a state, a
trainer or an import, fills these fields; what a file gives is checked as it comes in. Knows no model: `training.saved_state` asks whether it fits one.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from transformer_xl.config.fields import LARGEST_SIZE, read
from transformer_xl.errors import CheckpointError, TransformerXLError, shown

T = TypeVar("T")
MOST = 1 << 53
"""No counter of ours gets there, and up to there every whole number is also a float."""


@dataclass
class Window:
    """What one line of metrics.jsonl sums up: the steps since the last."""

    nats: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    norm: float = 0.0
    frequency_nats: float = 0.0
    """What the same tokens cost by how often each occurs (`training.stuck`)."""


@dataclass(kw_only=True)
class Timetable:
    """How training goes on that ends by the clock (`training.clock`), as found at the last mark."""

    minutes: float
    """That it was made for."""
    steps: int
    """Of the schedule."""
    validation_tokens: int
    """That a validation reads at most. 0: there is none."""
    validating: float
    saving: float
    """Seconds that each takes, as last measured: the end waits for both."""
    spent: float
    """Seconds until now, whatever they went to."""
    before: float
    """Those that were spent outside steps until it was made."""
    step: int
    seconds: float
    """Of the last mark: its step, and the time in steps until then."""
    position: float
    """Where on the schedule it was."""
    pace: float
    """By how much a step since then moves on."""
    mark: int
    """The step at which the pace is found anew."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """torch's GradScaler, by its own names."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int


@dataclass(frozen=True, kw_only=True)
class Counters:
    """training.json, in the order of its fields: those of `Session` under the same names."""

    step: int
    tokens: int
    seconds: float
    skipped: int
    rate_scale: float
    best_nats: float | None
    average_count: int
    window: Window
    lanes: dict[str, Any] | None = None
    """Where the data are read on; None: from their beginning, as an imported run does."""
    data: str | None = None
    """The fingerprint of the text; none in what was saved before it was kept, or is imported."""
    origin: str | None = None
    """The fingerprint of the weights it began with; None: of its own, drawn by chance."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """The fields of `Scaling`; empty where it was saved without one."""
    ranks: int = 1
    timetable: Timetable | None = None
    """None where steps decide."""

    @classmethod
    def unbegun(cls, *, step: int) -> "Counters":
        """Of a run that took its steps elsewhere, and none here."""
        none: dict[str, Any] = dict.fromkeys(("tokens", "seconds", "skipped", "average_count"), 0)
        return cls(step=step, rate_scale=1.0, best_nats=None, window=Window(), **none)

    def to_json(self) -> dict[str, Any]:
        unsaid = {"data": None, "origin": None, "ranks": 1, "timetable": None}
        return {name: value for name, value in asdict(self).items() if name not in unsaid or value != unsaid[name]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, path: Path) -> "Counters":
        """Refuses by the name of `path` and of the field what no training can have saved."""
        for name in ("lanes", "scaler"):
            if not isinstance(values.get(name, ""), dict) and (name, values.get(name, "")) != ("lanes", None):
                raise CheckpointError(f"{path}: {name} is missing, or is no table of fields")
        for name in ("data", "origin"):
            if not isinstance(values.get(name, ""), str):  # null, too: who does not know it leaves it out
                raise CheckpointError(f"{path}: {name}: expected a word, found {shown(values[name])}")
        tables = {name: values[name] for name in ("lanes", "scaler")}
        numbers = {name: value for name, value in values.items() if name not in tables}
        found = replace(_fields(cls, numbers, path=path), **tables)
        _check_counters(found, path=path)
        if found.lanes is None and found.tokens:
            raise CheckpointError(f"{path}: lanes is null, where the data go on after {found.tokens:,} tokens")
        if found.scaler:
            _check_scaling(_fields(Scaling, found.scaler, path=path, name="scaler"), path=path)
        return found


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    tensors: dict[str, Any]
    """By name; pieces of them, where they come from shards (`shards.Pieces`)."""
    counters: Counters


# --- what cannot be


def _fields(kind: type[T], values: Mapping[str, Any], *, path: Path, name: str = "") -> T:
    try:
        return read(kind, values, name=name)
    except TransformerXLError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _check_counters(found: Counters, *, path: Path) -> None:
    any_count, up_to_step = (0, MOST), (0, found.step)
    rules: dict[str, tuple[float, float]] = {
        **dict.fromkeys(("step", "tokens", "seconds"), any_count),
        **dict.fromkeys(("skipped", "average_count"), up_to_step),
        **({} if found.best_nats is None else {"best_nats": any_count}),
        **{"rate_scale": (0, 1), "ranks": (1, MOST)},
    }
    of_window: dict[str, tuple[float, float]] = {
        **dict.fromkeys(("nats", "tokens", "seconds", "frequency_nats"), any_count),
        **{"steps": (min(1, found.window.tokens), found.step), "norm": (0, math.inf)},
    }
    _check_ranges(found, rules, path=path)
    _check_ranges(found.window, of_window, path=path, of="window.")
    if (table := found.timetable) is not None:
        of_table: dict[str, tuple[float, float]] = {
            **dict.fromkeys(
                ("minutes", "validation_tokens", "validating", "saving", "spent", "before", "mark", "pace"), any_count
            ),
            **{
                "steps": (1, LARGEST_SIZE),
                "step": up_to_step,
                "seconds": (0, found.seconds),
                "position": (0, table.steps),
            },
        }
        _check_ranges(table, of_table, path=path, of="timetable.")


def _check_scaling(found: Scaling, *, path: Path) -> None:
    tiny, largest, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max, torch.iinfo(torch.int32).max
    rules = {"scale": (tiny, largest), "growth_factor": (1, largest), "backoff_factor": (tiny, 1)}
    counts = {"growth_interval": (1, most), "_growth_tracker": (0, most)}
    _check_ranges(found, {**rules, **counts}, path=path, of="scaler.")


def _check_ranges(found: object, rules: Mapping[str, tuple[float, float]], *, path: Path, of: str = "") -> None:
    for name, (least, most) in rules.items():
        value = getattr(found, name)
        if not (math.isfinite(value) and least <= value <= most):
            raise CheckpointError(f"{path}: {of}{name} is {value}; it must be a number from {least} to {most}")
