"""Whether a training state that files give could have been saved by a run of this configuration: all of it is checked before any of it is used."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from transformer_xl.checkpoint import TrainingState
from transformer_xl.config import RunConfig
from transformer_xl.config.fields import read
from transformer_xl.errors import CheckpointError, TransformerXLError
from transformer_xl.model import AnyMemory, AnyModel, Memory, Recurrent
from transformer_xl.tensor_files import Kind, check_kinds, kinds_of
from transformer_xl.training.optimisation import names_of_state

T = TypeVar("T")
MOST = 1 << 53
"""No counter of ours gets there, and up to there every whole number is also a float."""
CUDA_RANDOM_BYTES = 16
LOWER = (torch.bfloat16, torch.float16)
"""What autocast makes of some layers' memory."""


@dataclass
class Window:
    """What one line of metrics.jsonl sums up: the steps since the last."""

    nats: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    norm: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The numbers of training.json: those of `Session` under the same names."""

    step: int
    tokens: int
    seconds: float
    skipped: int
    rate_scale: float
    best_nats: float | None
    average_count: int
    window: Window
    data: str | None = None
    """The fingerprint of the text; none in what was saved before it was kept."""
    ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """torch's GradScaler, by its own names."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    _growth_tracker: int


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A training state in the parts that a session is made of."""

    counters: Counters
    lanes: dict[str, Any] | None
    """Where the data are read on; None: from their beginning, as an imported run does."""
    scaler: dict[str, Any]
    """Empty where it was saved without one."""
    memories: list[AnyMemory]
    """Of all lanes, in the micro-batches of one process; none before the first step."""
    optimiser: dict[str, dict[str, Tensor]]
    """By parameter; those without a gradient so far have none."""
    own_weights: dict[str, Tensor] = field(repr=False)
    """Those being trained, where the weights to use are their averages; otherwise none."""
    random: dict[str, Tensor] = field(repr=False)


def checked_state(state: TrainingState, *, model: AnyModel, config: RunConfig, folder: Path, on_cuda: bool) -> Checked:
    """`folder` is where it was read; `on_cuda` asks for that device's random states. What cannot be is a CheckpointError that names file and field."""
    counters, lanes, scaler = _numbers(state.values, config=config, path=folder / "training.json")
    tensors, path = state.tensors, folder / "training.safetensors"
    if counters.ranks > len(tensors):
        raise CheckpointError(
            f"{folder / 'training.json'}: ranks is {counters.ranks}, more than there are random states"
        )
    kept = {
        name: {key: f"optimiser.{key}.{name}" for key in names_of_state(name, parameter, training=config.training)}
        for name, parameter in model.named_parameters()
    }
    kept = {name: keys for name, keys in kept.items() if any(each in tensors for each in keys.values())}
    sizes = {"random.cpu": len(torch.get_rng_state())}
    if on_cuda or "random.cuda" in tensors:
        sizes["random.cuda"] = CUDA_RANDOM_BYTES
    wanted = {
        **{of_rank(kind, rank): Kind(torch.uint8, (sizes[kind],)) for kind in sizes for rank in range(counters.ranks)},
        **_kinds_of_weights(kept, model=model, averaged=counters.average_count > 0),
        **_kinds_of_memories(tensors, model=model, config=config),
    }
    check_kinds(kinds_of(tensors), wanted, path=path, asker="this run")
    optimiser = {name: {key: tensors[each] for key, each in keys.items()} for name, keys in kept.items()}
    random = {name: tensor for name, tensor in tensors.items() if name.startswith("random.")}
    _check_optimiser(optimiser, path=path)
    _check_random(random, path=path)
    return Checked(
        counters=counters,
        lanes=lanes,
        scaler=scaler,
        memories=_memories(tensors, model=model, config=config, path=path),
        optimiser=optimiser,
        own_weights=_starting_with(tensors, "weights."),
        random=random,
    )


def of_rank(kind: str, rank: int) -> str:
    """Rank 0's random state has the name that one process gives it."""
    return f"{kind}.{rank}" if rank else kind


# --- numbers


def _numbers(
    values: Mapping[str, Any], *, config: RunConfig, path: Path
) -> tuple[Counters, dict[str, Any] | None, dict[str, Any]]:
    rest = dict(values)
    for name in ("lanes", "scaler"):
        if not isinstance(rest.get(name, ""), dict) and (name, rest.get(name, "")) != ("lanes", None):
            raise CheckpointError(f"{path}: {name} is missing, or is no table of fields")
    lanes, scaler = rest.pop("lanes"), rest.pop("scaler")
    counters = _fields(Counters, rest, path=path)
    _check_counters(counters, path=path)
    if lanes is None and counters.tokens:
        raise CheckpointError(
            f"{path}: lanes is null, so where the data go on after {counters.tokens:,} tokens is not known"
        )
    if counters.average_count and config.training.average == "none":
        raise CheckpointError(f"{path}: average_count is {counters.average_count} in a run that averages nothing")
    if scaler:
        _check_scaling(_fields(Scaling, scaler, path=path, name="scaler"), path=path)
    return counters, lanes, scaler


def _fields(kind: type[T], values: Mapping[str, Any], *, path: Path, name: str = "") -> T:
    try:
        return read(kind, values, name=name)
    except TransformerXLError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _check_counters(found: Counters, *, path: Path) -> None:
    window = found.window
    best = 0.0 if found.best_nats is None else found.best_nats
    rules = {
        "step": (found.step, 0, MOST),
        "tokens": (found.tokens, 0, MOST),
        "seconds": (found.seconds, 0, MOST),
        "skipped": (found.skipped, 0, found.step),
        "rate_scale": (found.rate_scale, 0, 1),
        "best_nats": (best, 0, MOST),
        "average_count": (found.average_count, 0, found.step),
        "window.nats": (window.nats, 0, MOST),
        "window.tokens": (window.tokens, 0, MOST),
        "window.seconds": (window.seconds, 0, MOST),
        "window.steps": (window.steps, min(1, window.tokens), found.step),
        "window.norm": (window.norm, 0, math.inf),
        "ranks": (found.ranks, 1, MOST),
    }
    _check_ranges(rules, path=path)


def _check_scaling(found: Scaling, *, path: Path) -> None:
    tiny, largest, most = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max, torch.iinfo(torch.int32).max
    rules = {
        "scaler.scale": (found.scale, tiny, largest),
        "scaler.growth_factor": (found.growth_factor, 1, largest),
        "scaler.backoff_factor": (found.backoff_factor, tiny, 1),
        "scaler.growth_interval": (found.growth_interval, 1, most),
        "scaler._growth_tracker": (found._growth_tracker, 0, most),
    }
    _check_ranges(rules, path=path)


def _check_ranges(rules: Mapping[str, tuple[float, float, float]], *, path: Path) -> None:
    for name, (value, least, most) in rules.items():
        if not (math.isfinite(value) and least <= value <= most):
            raise CheckpointError(f"{path}: {name} is {value}; it must be a number from {least} to {most}")


# --- tensors


def _kinds_of_weights(kept: Mapping[str, Mapping[str, str]], *, model: AnyModel, averaged: bool) -> dict[str, Kind]:
    """What the optimiser keeps for each parameter that has had a gradient; and, where they are averaged, the parameters themselves."""
    weights = kinds_of(dict(model.named_parameters()))
    wanted = {f"weights.{name}": kind for name, kind in weights.items() if averaged}
    for name, keys in kept.items():
        wanted |= {each: Kind(torch.float32, ()) if key == "step" else weights[name] for key, each in keys.items()}
    return wanted


def _kinds_of_memories(tensors: Mapping[str, Tensor], *, model: AnyModel, config: RunConfig) -> dict[str, Kind]:
    """Of all micro-batches, or of none. As long as the first is, and in lower precision where that is so, as far as such a run can have it."""
    if not any(name.startswith("memory.") for name in tensors):
        return {}
    accumulation, like = config.training.accumulation, model.vocabulary.bias_V
    lanes = config.training.lanes // accumulation
    if isinstance(model, Recurrent):
        one = model.start_memory(lanes).tensors()
    else:
        first, full, length = tensors.get("memory.0.layer_0"), _starts_full(model), model.config.memory
        if not full and first is not None and first.dim() == 3:
            length = min(length, first.shape[1])
        nothing = torch.empty(0, dtype=like.dtype, device="meta")
        sizes = {"layers": model.config.n_layer, "lanes": lanes, "length": length, "width": model.config.d_model}
        one = Memory.start(**sizes, like=nothing, full=full).tensors()
    wanted = {f"memory.{part}.{name}": kind for part in range(accumulation) for name, kind in kinds_of(one).items()}
    lower = {name for name in wanted if ".layer_" in name and name in tensors and tensors[name].dtype in LOWER}
    return wanted | {name: Kind(tensors[name].dtype, wanted[name].shape) for name in lower}


def _memories(tensors: Mapping[str, Tensor], *, model: AnyModel, config: RunConfig, path: Path) -> list[AnyMemory]:
    parts = [_starting_with(tensors, f"memory.{part}.") for part in range(config.training.accumulation)]
    found = []
    for number, part in enumerate(parts if parts[0] else []):
        try:
            memory = model.memory_kind.from_tensors(part)
        except TransformerXLError as error:
            raise CheckpointError(f"{path}: memory.{number}: {error}") from None
        if memory.starts_full != _starts_full(model):
            raise CheckpointError(
                f"{path}: memory.{number}.starts_full is {memory.starts_full}, and model.initial_memory says otherwise"
            )
        found.append(memory)
    return found


def _starts_full(model: AnyModel) -> bool:
    return model.config.initial_memory == "zeros"


def _check_optimiser(states: Mapping[str, Mapping[str, Tensor]], *, path: Path) -> None:
    for name, state in states.items():
        for key, value in state.items():
            # The mean of squares, of which a root is taken; and a count.
            if key in ("exp_avg_sq", "step") and value.numel() and float(value.min()) < 0:
                raise CheckpointError(f"{path}: optimiser.{key}.{name} is negative, which it cannot become")


def _check_random(states: Mapping[str, Tensor], *, path: Path) -> None:
    for name, state in states.items():
        try:
            if name.startswith("random.cpu"):
                torch.Generator().set_state(state)
        except RuntimeError as error:
            raise CheckpointError(f"{path}: {name} is no state of a random generator ({error})") from None


def _starting_with(tensors: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    """By the rest of their names."""
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
