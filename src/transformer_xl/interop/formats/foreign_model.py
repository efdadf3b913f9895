"""What a foreign checkpoint says, in our own terms, and what holds for those of every kind: lengths asked for, whole numbers, shapes that fit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.errors import CheckpointError
from transformer_xl.model import build_shapes

MOST_STEPS = 2**31 - 1
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What the user says of lengths; None where the file's own hold."""

    segment: int | None = None
    memory: int | None = None
    clamp_len: int | None = None
    same_length: bool | None = None

    def asked(self) -> dict[str, Any]:
        """Those of a model and of its evaluation; how much is read at once is not the model's."""
        return {name: value for name, value in asdict(self).items() if value is not None and name != "segment"}

    def given_to(self, config: ModelConfig) -> ModelConfig:
        """The model's own memory grows with what is asked for; clamping and masking are of evaluation."""
        return replace(config, **self.asked())


@dataclass(frozen=True, kw_only=True)
class OptimiserState:
    name: str
    """adam, adamw or sgd."""
    learning_rate: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.0
    step: int
    tensors: dict[str, Tensor]
    """By our names: optimiser.exp_avg.layers.0.query.weight."""


@dataclass(frozen=True, kw_only=True)
class ForeignModel:
    kind: str
    model: ModelConfig
    weights: Mapping[str, Tensor]
    segment: int | None = None
    context: int = 0
    step: int = 0
    training: dict[str, Any] = field(default_factory=dict)
    """Fields of TrainingConfig, as far as the checkpoint tells them."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """Fields of EvaluationConfig, likewise."""
    vocabulary: dict[str, Any] | None = None
    """Where the model's own file holds it."""
    optimiser: OptimiserState | str | None = None
    """Words say why it was left out; None where there was none."""
    rules: dict[str, str] = field(default_factory=dict)
    """What its code computes in another way than ours, and what became of that."""


def momenta(ours: Mapping[str, Tensor], *, kind: str, step: int | None) -> dict[str, Tensor]:
    """One kind of an optimiser's numbers, by our names of the parameters, each with the steps it has taken where those count."""
    found = {f"optimiser.{kind}.{name}": value.float().contiguous() for name, value in ours.items()}
    return found if step is None else found | {f"optimiser.step.{name}": torch.tensor(float(step)) for name in ours}


# --- numbers that files give


def whole_step(value: object) -> int | None:
    """A number of steps as other people keep it, which may be a float; None for what is no such number."""
    if type(value) not in (int, float) or not 0 <= value <= MOST_STEPS:  # type: ignore[operator]  # NaN, too
        return None
    return int(value)  # type: ignore[call-overload, no-any-return]


def steps_taken(value: object, name: str) -> int:
    step = whole_step(value)
    if step is None:
        raise CheckpointError(f"{name}: {str(value)[:20]} is no number of steps; the checkpoint is damaged")
    return step


def whole(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


# --- shapes


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def check_shapes(ours: Shapes, config: ModelConfig) -> None:
    """Before anything is made of numbers in the configuration: a file of a few bytes can ask for any size."""
    compare_shapes(ours, wanted_shapes(config, tensors=len(ours)))


def wanted_shapes(config: ModelConfig, *, tensors: int) -> dict[str, tuple[int, ...]]:
    """Of each of our tensors, for a file of so many; a layer costs time and memory even where it has no numbers."""
    if config.n_layer > tensors:
        raise CheckpointError(
            f"n_layer: {config.n_layer:,} layers for a file of {tensors:,} tensors; the configuration is another model's"
        )
    return shapes_of(build_shapes(config).state_dict())


def compare_shapes(ours: Shapes, wanted: Shapes) -> None:
    for name in sorted(wanted.keys() ^ ours.keys()):
        raise CheckpointError(f"{name} exists on one side only: the model's configuration is not that of its weights")
    for name, shape in wanted.items():
        if ours[name] != shape:
            raise CheckpointError(f"{name} has shape {list(ours[name])} where the configuration makes it {list(shape)}")
