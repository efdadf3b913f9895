"""Low-rank adapters (Hu et al. 2021): beside every matrix W of every layer a product of two thin ones is learned, and W itself stands still.

    W x + up (down x)     while it is trained (`products.Linear`)
    (W + up down) x       everywhere else: readers, kernels and other software are given merged weights, and know of no adapter

All five matrices of a layer have one, those of the feed-forward part too, where most of a model's weights are. Embeddings have none: of words that
hardly occur in the new text nothing is learned, and an adapter to a large vocabulary would be larger than the layers'.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from transformer_xl.errors import ConfigError, shown
from transformer_xl.model import AnyModel, Recurrent
from transformer_xl.model.products import Linear, LowRank

DOWN, UP = ".adapter.down_RI", ".adapter.up_OR"
"""How the factors of `NAME.weight` are named after NAME."""


def attach(model: AnyModel, *, rank: int) -> None:
    """From now on only the adapters learn. They begin as nothing: what the model computes stays as it was."""
    check_rank(model, rank)
    model.requires_grad_(False)
    for _, linear in _matrices(model):
        sizes = {"inputs": linear.in_features, "outputs": linear.out_features}
        linear.adapter = LowRank(rank=rank, **sizes).to(linear.weight)


def check_rank(model: AnyModel, rank: int) -> None:
    if isinstance(model, Recurrent):
        raise ConfigError(
            f"`adapter=` is for the layers of a Transformer-XL, and this is an {model.config.cell}; train all its weights, without an adapter"
        )
    narrowest = min(min(linear.weight.shape) for _, linear in _matrices(model))
    if not 1 <= rank <= narrowest:
        raise ConfigError(
            f"`adapter=`: rank {shown(rank)}, where the narrowest matrix of this model has {narrowest}; take 1 to {narrowest}"
        )


def factor_shapes(model: AnyModel, *, rank: int) -> dict[str, tuple[int, int]]:
    """Of every factor of an adapter to this model, by name."""
    found: dict[str, tuple[int, int]] = {}
    for name, linear in _matrices(model):
        outputs, inputs = linear.weight.shape
        found |= {name + DOWN: (rank, inputs), name + UP: (outputs, rank)}
    return found


def factors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those among a model's weights that are an adapter's."""
    return {name: weight for name, weight in weights.items() if name.endswith((DOWN, UP))}


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As a model without adapters has them. Added in float64 and rounded once, so that the sum is the same wherever it is made."""
    plain = {name: weight for name, weight in weights.items() if name not in factors(weights)}
    for name in [name.removesuffix(UP) for name in weights if name.endswith(UP)]:
        plain[f"{name}.weight"] = _sum(
            weights[f"{name}.weight"], up_OR=weights[name + UP], down_RI=weights[name + DOWN]
        )
    return plain


@contextmanager
def merged_in_place(model: AnyModel) -> Iterator[None]:
    """The model as its readers want it; as it was, to the bit, afterwards."""
    adapted = [(linear, linear.weight.data, linear.adapter) for _, linear in _matrices(model)]
    try:
        for linear, weight_OI, adapter in adapted:
            if adapter is not None:
                linear.weight.data = _sum(weight_OI, up_OR=adapter.up_OR, down_RI=adapter.down_RI)
                linear.adapter = None
        yield
    finally:
        for linear, weight_OI, adapter in adapted:
            linear.weight.data, linear.adapter = weight_OI, adapter


def _sum(weight_OI: Tensor, *, up_OR: Tensor, down_RI: Tensor) -> Tensor:
    exact = [tensor.detach().cpu().double() for tensor in (weight_OI, up_OR, down_RI)]
    return torch.addmm(*exact).to(weight_OI)


def _matrices(model: AnyModel) -> list[tuple[str, Linear]]:
    named = model.layers.named_modules(prefix="layers")
    return [(name, module) for name, module in named if isinstance(module, Linear)]
