"""An adapter at rest: one small safetensors file, whose header says to which weights it belongs. Anybody may have written it.

layers.0.query.adapter.down_RI  layers.0.query.adapter.up_OR  ...     float32
header: kind, base (the fingerprint of the weights it was trained beside), rank, corpus, step, sha256 of all this
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from transformer_xl.errors import CheckpointError, ConfigError, shown
from transformer_xl.model import AnyModel
from transformer_xl.model.adapters import check_rank, factor_shapes, merged
from transformer_xl.tensor_files import Kind, TensorFile, checksum, is_finite, reading, write_tensors

KIND = "adapter"
TOLD = ("base", "rank", "corpus", "step")
ADAPTER = "an adapter, as training makes one"
MOST_DIGITS = 18


@dataclass(frozen=True, kw_only=True)
class Adapter:
    base: str
    """The fingerprint of the weights it was trained beside."""
    rank: int
    corpus: str
    """What it was trained on."""
    step: int
    factors: Mapping[str, Tensor] = field(repr=False)


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Of weights by their names, types, shapes and numbers, wherever they lie."""
    return checksum(weights, {})


def write_adapter(path: Path, adapter: Adapter) -> None:
    told = {name: str(getattr(adapter, name)) for name in TOLD}
    plain = {name: factor.detach().cpu().contiguous() for name, factor in adapter.factors.items()}
    write_tensors(path, plain, metadata={"kind": KIND, **told})


def read_adapter(path: Path | str, *, model: AnyModel, base: str) -> Adapter:
    """`base`: the fingerprint of the weights of `model`, beside which it must have been trained."""
    with reading(path, what=ADAPTER) as file:
        if file.metadata.get("kind") != KIND:
            raise CheckpointError(f"{path} is not {ADAPTER}; give the adapter.safetensors of a run")
        file.check_metadata(("kind", *TOLD))
        rank, step = whole_number(file, "rank"), whole_number(file, "step")
        if file.metadata.get("base") != base:
            raise CheckpointError(
                f"{path} was trained beside other weights than these; give the run, and the checkpoint of it, that it began from"
            )
        try:
            check_rank(model, rank)
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from None
        shapes = factor_shapes(model, rank=rank)
        file.check({name: Kind(torch.float32, shape) for name, shape in shapes.items()}, asker="this model")
        # Nothing stays in the mapped file.
        factors = {name: factor.clone() for name, factor in file.tensors().items()}
        return Adapter(base=base, rank=rank, corpus=file.metadata.get("corpus", ""), step=step, factors=factors)


def merge_adapter(model: AnyModel, path: Path | str) -> Adapter:
    """Adds the adapter in `path` to the weights of `model`, which must be those it was trained beside."""
    weights = model.state_dict()
    adapter = read_adapter(path, model=model, base=fingerprint(weights))
    together = merged({**weights, **adapter.factors})
    for name, weight in together.items():
        if not is_finite(weight):
            raise CheckpointError(f"{path}: with it {name} holds numbers that are not finite; use an older copy")
    model.load_state_dict(together, assign=True)
    return adapter


def whole_number(file: TensorFile, name: str) -> int:
    told = file.metadata.get(name, "")
    if not (told.isascii() and told.isdigit() and len(told) <= MOST_DIGITS):
        raise CheckpointError(f"{file.path}: {name} is {shown(told)} in its header, which is no whole number")
    return int(told)
