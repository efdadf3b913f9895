"""How much memory a training step takes on each device, by arithmetic: what is kept between steps, and what the backward pass needs.

Counts numbers, not allocations: `docs/scaling.md` has what was measured beside it.
"""

from dataclasses import dataclass
from functools import cache

import torch

from transformer_xl import native
from transformer_xl.config import ModelConfig, RunConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model import AnyModel, build_model
from transformer_xl.model.attention import Backend
from transformer_xl.training.muon import is_matrix
from transformer_xl.training.ranks import Parallel

FLOAT = 4
OPTIMISER_NUMBERS = {"adam": 2, "adamw": 2, "sgd": 0, "muon": 2}
"""For each weight, beside its gradient; momentum would be one more, and muon has one less for a matrix."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """In bytes, for one device."""

    weights: int
    """With gradients, the optimiser's numbers and averages."""
    memory: int
    """What the layers remember: before the step and after it."""
    activations: int
    """Kept for the backward pass, logits included."""

    @property
    def total(self) -> int:
        return self.weights + self.memory + self.activations


def footprint_of(
    run: RunConfig,
    *,
    devices: int = 1,
    parallel: Parallel = "ddp",
    recompute: bool | None = None,
    by: Backend = "native",
) -> Footprint:
    """`recompute`: with activation checkpointing, or as the run has it. `by`: who attends; torch, where the kernels of a card do not know the model."""
    model, training = run.model, run.training
    if not isinstance(model, ModelConfig):
        raise ConfigError(f"model.cell: {model.cell} is not counted; memory is estimated for Transformer-XL")
    recompute = training.checkpoint_activations if recompute is None else recompute
    by = "torch" if by == "triton" and not native.supports("tiles", model) else by
    B, T = -(-training.lanes // (devices * training.accumulation)), training.segment + training.context
    of_layer = B * per_lane(model, T=T, by=by) * FLOAT
    inputs = B * T * model.d_model * FLOAT
    kept = model.n_layer * inputs + of_layer if recompute else model.n_layer * of_layer
    if by == "triton":  # products with distances and their gradient, while one layer is computed
        kept += 2 * B * model.n_head * T * (model.memory + T) * FLOAT
    tokens = B * training.segment
    return Footprint(
        weights=weights_of(run, devices=devices, parallel=parallel),
        memory=2 * model.n_layer * B * training.accumulation * model.memory * model.d_model * FLOAT,
        activations=kept + 3 * tokens * (model.cluster_edges[1] + model.clusters - 1) * FLOAT,
    )


def per_lane(model: ModelConfig, *, T: int, by: Backend) -> int:
    """Numbers that one layer keeps for one lane of T tokens: inputs of products and norms, keys and values, probabilities."""
    D, HK, F, M = model.d_model, model.n_head * model.d_head, model.d_inner, model.memory
    S = M + T
    dropped, masked = model.dropout > 0, model.attention_dropout > 0
    if by == "native":  # a mask is a seed
        return T * (4 * D + 4 * HK + F + model.n_head * S) + M * (D + 2 * HK)
    of_token = (6 if dropped else 4) * D + (3 if dropped else 1) * F
    if by == "triton":  # and so it is here, but only attention's; of probabilities nothing is kept but their sum
        return T * (of_token + 4 * HK + model.n_head) + M * (D + 2 * HK)
    return T * (of_token + 3 * HK + (3 if masked else 1) * model.n_head * S) + M * D + S * 3 * HK


def weights_of(run: RunConfig, *, devices: int, parallel: Parallel) -> int:
    model = empty_model(run)
    count = sum(weight.numel() for weight in model.parameters())
    training = run.training
    numbers = 2 + OPTIMISER_NUMBERS[training.optimiser] + (training.momentum > 0) + (training.average != "none")
    kept = count * numbers
    if training.optimiser == "muon":
        kept -= sum(weight.numel() for name, weight in model.named_parameters() if is_matrix(name, weight))
    if devices == 1:
        return kept * FLOAT
    if parallel == "ddp":
        return (kept + count) * FLOAT  # the buckets in which gradients travel
    layers = [sum(weight.numel() for weight in layer.parameters()) for layer in model.layers]
    rest = count - sum(layers)  # embeddings and softmax: whole while a step lasts, with their gradient
    return (kept // devices + 2 * (rest + 2 * max(layers))) * FLOAT


@cache
def empty_model(run: RunConfig) -> AnyModel:
    with torch.device("meta"):
        return build_model(run.model)
