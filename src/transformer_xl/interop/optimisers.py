"""Other people's optimiser states -> ours, where the optimiser is the same one; where it is not, a sentence says why it was left out.

Momenta have the shapes of their weights, so that whatever turns weights into ours turns these, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_xl.errors import TransformerXLError

MOMENTA = ("exp_avg", "exp_avg_sq", "momentum_buffer")
TORCH_ADAM = {"betas": [0.9, 0.999], "eps": 1e-8, "amsgrad": False}
"""What ours runs with."""
Mapped = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class State:
    name: str
    """adam, adamw or sgd."""
    learning_rate: float
    weight_decay: float
    momentum: float
    step: int
    tensors: dict[str, Tensor]
    """By our names: optimiser.exp_avg.layers.0.query.weight."""


def optimiser_state(
    facts: Mapping[str, Any], tensors: Mapping[str, Tensor], *, order: list[str], mapped: Mapped, called: str | None
) -> State | str:
    """`order` names the parameters as the optimiser lists them; `called` is what its settings call it, where they do."""
    if "left_out" in facts:
        return str(facts["left_out"])
    groups = facts["groups"]
    if called not in (None, "adam", "adamw", "sgd"):
        return f"{called} is no optimiser of ours"
    if len(groups) != 1 or facts["others"]:
        return "it has several groups of parameters, or fields that ours has not"
    group = groups[0]
    name = _name(group)
    if name is None:
        return "it is neither Adam with torch's own settings nor SGD"
    if facts["parameters"] != len(order):
        return f"it is for {facts['parameters']} parameters where the model has {len(order)}"
    steps = {float(value) for value in facts["steps"].values()}
    steps |= {float(value) for key, value in tensors.items() if key.endswith(".step") and value.numel() == 1}
    if len(steps) > 1:
        return "its parameters have been updated a different number of times"
    step = int(steps.pop()) if steps else 0
    found: dict[str, Tensor] = {}
    for kind in MOMENTA:
        theirs = {order[int(key.split(".")[0])]: value for key, value in tensors.items() if key.endswith(f".{kind}")}
        if not theirs:
            continue
        try:
            ours = mapped(theirs)
        except TransformerXLError as error:
            return f"its {kind} does not fit the weights ({error})"
        for parameter, value in ours.items():
            found[f"optimiser.{kind}.{parameter}"] = value.float().contiguous()
            if name != "sgd":
                found[f"optimiser.step.{parameter}"] = torch.tensor(float(step))
    if name != "sgd" and not found:
        return "it has taken no step yet"
    rate = group.get("initial_lr", group.get("lr"))
    return State(
        name=name,
        learning_rate=float(rate) if isinstance(rate, (int, float)) else 0.0,
        weight_decay=float(group.get("weight_decay") or 0.0),
        momentum=float(group.get("momentum") or 0.0),
        step=step,
        tensors=found,
    )


def _name(group: Mapping[str, Any]) -> str | None:
    if "amsgrad" in group:
        if any(group.get(name) != value for name, value in TORCH_ADAM.items()):
            return None
        return "adamw" if group.get("decoupled_weight_decay") else "adam"
    if "dampening" in group and not group.get("dampening") and not group.get("nesterov"):
        return "sgd"
    return None
