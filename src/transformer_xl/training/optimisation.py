"""How weights move: optimiser, learning rate, clipping, averages. Knows no data."""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from transformer_xl.config import TrainingConfig
from transformer_xl.training.muon import Muon, is_matrix, is_table
from transformer_xl.training.ranks import full

EMBEDDINGS = ("vocabulary.tables.", "vocabulary.output_tables.", "ngrams.tables_")
PLATEAU_FACTOR = 0.5


def build_optimiser(model: nn.Module, training: TrainingConfig) -> Optimizer:
    """Groups: everybody, and the embeddings with their own factor on the rate; muon has the matrices in one of their own."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    embeddings = [parameter for name, parameter in named if name.startswith(EMBEDDINGS)]
    everybody = [parameter for name, parameter in named if not name.startswith(EMBEDDINGS)]
    groups = [{"params": everybody, "factor": 1.0}, {"params": embeddings, "factor": training.embedding_rate_factor}]
    rate, decay = training.learning_rate, training.weight_decay
    match training.optimiser:
        case "adam":
            return torch.optim.Adam(groups, lr=rate, weight_decay=decay, fused=True)
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, weight_decay=decay, fused=True)
        case "sgd":
            sgd = torch.optim.SGD(groups, lr=rate, weight_decay=decay, momentum=training.momentum, fused=True)
            if training.momentum:
                # torch's fused step takes momenta for all parameters or for none, and some (a tail's) have their first gradient later than others.
                for _, parameter in named:
                    sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            return sgd
        case "muon":
            parts: dict[str, list[Tensor]] = {kind: [] for kind in ("matrices", "tables", "everybody", "embeddings")}
            for name, weight in named:
                kind = "embeddings" if name.startswith(EMBEDDINGS) else "everybody"
                kind = "matrices" if is_matrix(name, weight) else "tables" if is_table(name) else kind
                parts[kind].append(weight)
            factors = {"embeddings": training.embedding_rate_factor}
            return Muon(
                [{"params": weights, "factor": factors.get(kind, 1.0)} for kind, weights in parts.items()],
                lr=rate,
                weight_decay=decay,
            )


def names_of_state(name: str, weight: Tensor, *, training: TrainingConfig) -> tuple[str, ...]:
    """What the optimiser keeps for this parameter once it has had a gradient."""
    if training.optimiser == "sgd":
        return ("momentum_buffer",)
    if training.optimiser == "muon" and is_matrix(name, weight):
        return "step", "momentum"
    if training.optimiser == "muon" and is_table(name):
        return ("square",)
    return "step", "exp_avg", "exp_avg_sq"


def kept_on(key: str, state: Collection[str], *, device: torch.device) -> torch.device:
    """Where a part of a parameter's state lives: muon counts a matrix's steps on the host (`muon`), torch's fused optimisers where they compute."""
    return torch.device("cpu") if key == "step" and "momentum" in state else device


def set_rate(optimiser: Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate * group["factor"]


def learning_rate(training: TrainingConfig, *, update: float) -> float:
    """The rate of the update after `update` earlier ones, before plateau's and the segment's factor. By the clock, `update` need not be whole.

    The two published rules differ at the start: pytorch sets the rate after each step, so its very first update uses the full rate.
    """
    peak, warm_up = training.learning_rate, training.warm_up_steps
    if training.schedule_rule == "pytorch" and update == 0:
        return peak
    if update < warm_up:
        return peak * update / warm_up
    match training.schedule:
        case "constant" | "plateau":
            return peak
        case "inverse_square_root":
            return peak * math.sqrt(warm_up / update)
        case "cosine":
            if training.schedule_rule == "pytorch":
                share = update / training.steps
            else:
                share = (update - warm_up) / max(1, training.steps - warm_up)
            return peak * (training.floor + (1 - training.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


def gradient_norm(model: nn.Module, *, clip: float) -> Tensor:
    """The norm of all gradients together, which are scaled down to `clip` where it is larger. Not finite where any of them is not; then none is of use."""
    dense: list[nn.Parameter] = []
    rows: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            rows.append(parameter.grad.values())
        else:
            dense.append(parameter)
    norm = full(torch.nn.utils.get_total_norm([*(parameter.grad for parameter in dense), *rows]))  # type: ignore[list-item]
    if clip:
        torch.nn.utils.clip_grads_with_norm_(dense, clip, norm)
        for values_PE in rows:
            values_PE.mul_((clip / (norm + 1e-6)).clamp(max=1.0))
    return norm


class Average:
    """A second set of weights that follows the first: exponentially, or as the plain mean since a step (the PTB recipe)."""

    def __init__(self, training: TrainingConfig) -> None:
        self.training = training
        self.count = 0
        self.weights: dict[str, Tensor] = {}

    def update(self, model: nn.Module, *, step: int) -> None:
        """After update number `step`."""
        if self.training.average == "none" or step <= self.training.average_from:
            return
        self.count += 1
        share = 1 / self.count if self.training.average == "uniform" else self.training.average_share
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad:
                    continue
                if name in self.weights:
                    self.weights[name].lerp_(parameter, share)
                else:
                    self.weights[name] = parameter.detach().clone()

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights, where there are any yet; as it was, afterwards."""
        own = {name: parameter.data for name, parameter in model.named_parameters()} if self.weights else {}
        try:
            for name, parameter in model.named_parameters():
                parameter.data = self.weights.get(name, parameter.data)
            yield
        finally:
            for name, parameter in model.named_parameters():
                parameter.data = own.get(name, parameter.data)
