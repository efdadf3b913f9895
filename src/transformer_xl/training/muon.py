"""Muon (Jordan et al. 2024): a matrix moves by its momentum made orthogonal, so that no direction is left behind; rows of runs of tokens, most of which a step
does not touch, move when they are touched; all else moves as AdamW moves it.

The step of a matrix is as large as AdamW's would be (Liu et al. 2025), so one learning rate serves both. Our own rather than torch.optim.Muon, which computes
in bfloat16 whatever the device, leaves all that is no matrix to somebody else, and moves every matrix at every step.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from transformer_xl.devices import choose_precision
from transformer_xl.model.products import matmul
from transformer_xl.training.ranks import full, sharded

MOMENTUM = 0.95
TURNS = 2
"""A matrix moves at every second step, twice as far: making it orthogonal is what costs, and momentum hardly turns in one step."""
ADAM_SIZE = 0.2
"""The root mean square of AdamW's steps, as they measured it."""
POLYNOMIALS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""ax + bx^3 + cx^5, one after the other: each takes singular values nearer to 1."""
WIDE = 2
"""Times as wide as high, from which on all of them are found from the small side."""


ROW_DECAY = 0.999
"""Of a row's mean square gradient, at each step that touches it."""


def is_table(name: str) -> bool:
    """Whether this parameter of a model holds rows of runs of tokens. AdamW would move each of them on by its momentum long after it was read."""
    return name.startswith("ngrams.tables_")


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether this parameter of a model is a matrix between activations. A table of words is not: its rows stand for themselves."""
    return weight.dim() == 2 and name.endswith(".weight") and name.startswith(("layers.", "encoding.relative_key."))


class Muon(Optimizer):
    """The first group is of matrices, the second of tables whose rows are runs of tokens, all others are AdamW's."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, weight_decay: float) -> None:
        matrices, tables, *others = groups
        super().__init__([matrices, tables], {"lr": lr, "weight_decay": weight_decay})
        self.adam = AdamW(others, lr=lr, weight_decay=weight_decay, fused=True)
        self.adam.state = self.state
        self.param_groups += self.adam.param_groups

    found_inf: Tensor | None = None
    """As torch's fused optimisers take it: 1 on the device where nothing may move, because something is not finite. None: everything is."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.adam.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.adam.step()
        finite = None if self.found_inf is None else self.found_inf == 0
        matrices, tables = self.param_groups[:2]
        for table in tables["params"]:
            if table.grad is not None:
                self._move_rows(table, rate=tables["lr"], finite=finite)
        rate = TURNS * matrices["lr"]
        for number, weight in enumerate(matrices["params"]):
            if weight.grad is None:
                continue
            state = self.state[weight]
            if not state:
                # Counted on the host, where the turn is needed; nobody asks a device for it.
                state["step"], state["momentum"] = torch.zeros((), device="cpu"), torch.zeros_like(weight)
            gradient = _where(finite, weight.grad, state["momentum"])  # towards itself momentum does not move
            momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
            turn = number + int(state["step"])
            state["step"] += 1
            if turn % TURNS == 0:
                way = orthogonal(full(torch.lerp(gradient, momentum, MOMENTUM)), half=half_for(weight.device))
                before = weight.clone() if finite is not None else weight
                weight.mul_(1 - rate * matrices["weight_decay"])
                weight.add_(sharded(way, like=weight), alpha=-rate * ADAM_SIZE * math.sqrt(max(weight.shape)))
                if finite is not None:
                    weight.copy_(torch.where(finite, weight, before))

    def _move_rows(self, table: Tensor, *, rate: float, finite: Tensor | None) -> None:
        """Those with a gradient, each by it over the root of its own mean square."""
        gradient, state = table.grad, self.state[table]
        assert gradient is not None
        if finite is not None:  # a row whose gradient is 0 does not move
            assert not gradient.is_sparse, "a device would be asked how many rows there are"
            gradient = gradient.masked_fill(~finite, 0.0)
        if not state:
            state["square"] = torch.zeros_like(table[..., 0])
        square = state["square"]
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            at_P, gradient_PE = gradient.indices()[0] * table.shape[1] + gradient.indices()[1], gradient.values()
            found_P, before_P = gradient_PE.square().mean(-1), square.view(-1)[at_P]
            square_P = torch.where(found_P > 0, ROW_DECAY * before_P + found_P, before_P)
            square.view(-1)[at_P] = square_P
            way_PE = gradient_PE / square_P.sqrt().add_(1e-10)[:, None]
            table.view(-1, table.shape[-1]).index_add_(0, at_P, way_PE, alpha=-rate)
            return
        found = gradient.square().mean(-1)
        square.copy_(torch.where(found > 0, ROW_DECAY * square + found, square))
        table.addcdiv_(gradient, square.sqrt().add_(1e-10)[..., None], value=-rate)


def _where(finite: Tensor | None, gradient: Tensor, otherwise: Tensor) -> Tensor:
    return gradient if finite is None else torch.where(finite, gradient, otherwise)


@cache
def half_for(device: torch.device) -> torch.dtype | None:
    """bfloat16 on a GPU that computes in it. On a processor, where wide matrices take a way that rounding spoils, nothing was learned so."""
    return torch.bfloat16 if device.type == "cuda" and choose_precision(device) == "bfloat16" else None


def orthogonal(matrix_RC: Tensor, *, half: torch.dtype | None = None) -> Tensor:
    """The same with all its singular values about 1, by polynomials, which need products alone. `half`: what these are in, if less than the matrix; its norm
    is exact, and it is multiplied itself, at every polynomial: products of its square with itself would add up what rounding does."""
    R, C = matrix_RC.shape
    if R > C:
        return orthogonal(matrix_RC.mT, half=half).mT
    x_RC: Tensor = (matrix_RC / (1.02 * matrix_RC.norm() + 1e-7)).to(half or matrix_RC.dtype).contiguous()
    if half is None and C >= WIDE * R:
        return matmul(_turning(matmul(x_RC, x_RC.mT)), x_RC)
    for a, b, c in POLYNOMIALS:
        square_RR = matmul(x_RC, x_RC.mT)
        x_RC = matmul(_polynomial(square_RR, b, c), x_RC).add_(x_RC, alpha=a)
    return x_RC.to(matrix_RC.dtype)


def _turning(square_RR: Tensor) -> Tensor:
    """What a wide matrix is to be multiplied by, from its product with itself: all polynomials at the cost of the small side."""
    turning_RR: Tensor | None = None
    for a, b, c in POLYNOMIALS:
        step_RR = _polynomial(square_RR, b, c)
        step_RR.diagonal().add_(a)
        turning_RR = step_RR if turning_RR is None else matmul(step_RR, turning_RR)
        square_RR = matmul(matmul(step_RR, square_RR), step_RR)
    assert turning_RR is not None
    return turning_RR


def _polynomial(square_RR: Tensor, b: float, c: float) -> Tensor:
    return matmul(square_RR, square_RR).mul_(c).add_(square_RR, alpha=b)
