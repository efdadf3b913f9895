"""Engines at rest, which anybody may have written: what each must hold, whichever its kind, before an engine is made of it."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from transformer_xl.errors import CheckpointError
from transformer_xl.model import AnyModel
from transformer_xl.tensor_files import Kind, TensorFile

SAVED = "a saved engine"
MOST_READ = 1 << 53
"""No lane gets there, and counting on from there cannot overflow."""


def saved_lanes(file: TensorFile, *, asked: int | None) -> int:
    """How many it has, by its own count of what each has read."""
    shape = file.kinds["read"].shape if "read" in file.kinds else ()
    if len(shape) != 1 or not shape[0]:
        raise CheckpointError(f"{file.path} is not {SAVED}, or is damaged: it does not say what each lane has read")
    if asked not in (None, shape[0]):
        raise CheckpointError(f"{file.path} has {shape[0]} lanes where {asked} are asked for; give lanes={shape[0]}")
    return shape[0]


def saved_tensors(file: TensorFile, wanted: Mapping[str, Kind], *, model: AnyModel, lanes: int) -> dict[str, Tensor]:
    """Where the model is. `wanted`: what this kind of engine keeps beside `read` and `last_hidden`."""
    like = model.vocabulary.bias_V
    common = {"read": Kind(torch.int64, (lanes,)), "last_hidden": Kind(like.dtype, (lanes, model.config.d_model))}
    file.check({**wanted, **common}, asker="this model", optional=("last_hidden",))
    tensors = file.tensors()
    _check_read(file.path, tensors)
    # Counts stay on the CPU, and nothing stays in the mapped file.
    return {
        name: value.to(like.device, copy=True) if value.is_floating_point() else value.clone()
        for name, value in tensors.items()
    }


def _check_read(path: Path, tensors: Mapping[str, Tensor]) -> None:
    for lane, read in enumerate(tensors["read"].tolist()):
        if not 0 <= read <= MOST_READ:
            raise CheckpointError(f"{path}: read is {read} in lane {lane}, which is no number of tokens")
        if read and "last_hidden" not in tensors:
            raise CheckpointError(
                f"{path} lacks last_hidden, from which the token after the {read:,} of lane {lane} is predicted"
            )
