"""Whether a training state that files give could have been saved by a run of this configuration: all of it is checked before any of it is used."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.checkpoint import TrainingState
from transformer_xl.checkpoint.shards import AnyTensor
from transformer_xl.config import RunConfig
from transformer_xl.errors import CheckpointError, TransformerXLError
from transformer_xl.model import AnyMemory, AnyModel, Memory, Recurrent
from transformer_xl.tensor_files import Kind, check_kinds, kinds_of
from transformer_xl.training.optimisation import names_of_state

CUDA_RANDOM_BYTES = 16
LOWER = (torch.bfloat16, torch.float16)
"""What autocast makes of some layers' memory."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A training state in the parts that a session is made of."""

    memories: list[AnyMemory]
    """Of all lanes, in the micro-batches of one process; none before the first step."""
    optimiser: dict[str, dict[str, AnyTensor]]
    """By parameter; those without a gradient so far have none."""
    own_weights: dict[str, AnyTensor] = field(repr=False)
    """Those being trained, where the weights to use are their averages; otherwise none."""
    random: dict[str, Tensor] = field(repr=False)


def checked_state(state: TrainingState, *, model: AnyModel, config: RunConfig, folder: Path, on_cuda: bool) -> Checked:
    """`folder` is where it was read; `on_cuda` asks for that device's random states. What cannot be is a CheckpointError that names file and field."""
    counters, told = state.counters, folder / "training.json"
    tensors, path = state.tensors, folder / "training.safetensors"
    if counters.average_count and config.training.average == "none":
        raise CheckpointError(f"{told}: average_count is {counters.average_count} in a run that averages nothing")
    if counters.ranks > len(tensors):
        raise CheckpointError(f"{told}: ranks is {counters.ranks}, more than there are random states")
    kept = {
        name: {key: f"optimiser.{key}.{name}" for key in names_of_state(name, parameter, training=config.training)}
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
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
        memories=_memories(tensors, model=model, config=config, path=path),
        optimiser=optimiser,
        own_weights=_starting_with(tensors, "weights."),
        random=random,
    )


def of_rank(kind: str, rank: int) -> str:
    """Rank 0's random state has the name that one process gives it."""
    return f"{kind}.{rank}" if rank else kind


# --- tensors


def _kinds_of_weights(kept: Mapping[str, Mapping[str, str]], *, model: AnyModel, averaged: bool) -> dict[str, Kind]:
    """What the optimiser keeps for each parameter that has had a gradient; and, where they are averaged, the parameters themselves."""
    learning = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    weights = kinds_of(learning)
    wanted = {f"weights.{name}": kind for name, kind in weights.items() if averaged}
    for name, keys in kept.items():
        others = {"step": Kind(torch.float32, ()), "square": Kind(weights[name].dtype, weights[name].shape[:-1])}
        wanted |= {each: others.get(key, weights[name]) for key, each in keys.items()}
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
        sizes["recent"] = model.config.recent
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


def _check_optimiser(states: Mapping[str, Mapping[str, AnyTensor]], *, path: Path) -> None:
    for name, state in states.items():
        for key, value in state.items():
            # The mean of squares, of which a root is taken; and a count.
            if key in ("exp_avg_sq", "square", "step") and value.numel() and float(value.min()) < 0:
                raise CheckpointError(f"{path}: optimiser.{key}.{name} is negative, which it cannot become")


def _check_random(states: Mapping[str, Tensor], *, path: Path) -> None:
    for name, state in states.items():
        try:
            if name.startswith("random.cpu"):
                torch.Generator().set_state(state)
        except RuntimeError as error:
            raise CheckpointError(f"{path}: {name} is no state of a random generator ({error})") from None


def _starting_with(tensors: Mapping[str, Any], start: str) -> dict[str, Any]:
    """By the rest of their names."""
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
