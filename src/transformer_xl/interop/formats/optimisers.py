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
MOST_STEPS = 2**31 - 1
LARGEST_NUMBER = 1e6
"""Of a rate, a weight decay or a momentum."""
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
    steps = set(facts["steps"].values())
    steps |= {value.item() for key, value in tensors.items() if key.endswith(".step") and value.numel() == 1}
    if len(steps) > 1:
        return "its parameters have been updated a different number of times"
    step = whole_step(steps.pop() if steps else 0)
    if step is None:
        return "the number of its steps is none that a training has"
    rate, decay, momentum = (
        _number(group, *names) for names in (("initial_lr", "lr"), ("weight_decay",), ("momentum",))
    )
    if rate is None or decay is None or momentum is None:
        return "its rate, weight decay or momentum is no number"
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
    return State(name=name, learning_rate=rate, weight_decay=decay, momentum=momentum, step=step, tensors=found)


def whole_step(value: object) -> int | None:
    """A number of steps as other people keep it, which may be a float; None for what is no such number."""
    if type(value) not in (int, float) or not 0 <= value <= MOST_STEPS:  # type: ignore[operator]  # NaN, too
        return None
    return int(value)  # type: ignore[call-overload, no-any-return]


def _number(group: Mapping[str, Any], *names: str) -> float | None:
    """The first of these that is there; 0 for none."""
    value = next((group[name] for name in names if group.get(name) is not None), 0.0)
    return float(value) if type(value) in (int, float) and 0 <= value <= LARGEST_NUMBER else None


def _name(group: Mapping[str, Any]) -> str | None:
    if "amsgrad" in group:
        if any(group.get(name) != value for name, value in TORCH_ADAM.items()):
            return None
        return "adamw" if group.get("decoupled_weight_decay") else "adam"
    if "dampening" in group and not group.get("dampening") and not group.get("nesterov"):
        return "sgd"
    return None
