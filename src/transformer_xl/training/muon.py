"""Muon (Jordan et al. 2024): a matrix moves by its momentum made orthogonal, so that no direction is left behind; all else moves as AdamW moves it.

Orthogonal in blocks of 64 rows, as many as a head has: on small models that was no worse than whole matrices, at a fifth of the work (docs/experiments.md). The step of a matrix is as large as AdamW's would be (Liu et al. 2025), so one learning rate serves both. Our own rather than torch.optim.Muon, which computes
in bfloat16 whatever the device, far slower on processors that have none, and leaves all that is no matrix to somebody else.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from transformer_xl.training.ranks import full, sharded

MOMENTUM = 0.95
BLOCK = 64
"""Rows that are made orthogonal among themselves."""
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


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether this parameter of a model is a matrix between activations. A table of words is not: its rows stand for themselves."""
    return weight.dim() == 2 and name.startswith(("layers.", "encoding.relative_key."))


class Muon(Optimizer):
    """The first group is of matrices, all others are AdamW's."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, weight_decay: float) -> None:
        matrices, *others = groups
        super().__init__([matrices], {"lr": lr, "weight_decay": weight_decay})
        self.adam = AdamW(others, lr=lr, weight_decay=weight_decay, fused=True)
        self.adam.state = self.state
        self.param_groups += self.adam.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.adam.step()
        matrices = self.param_groups[0]
        for weight in matrices["params"]:
            if weight.grad is None:
                continue
            state = self.state[weight]
            if not state:
                state["momentum"] = torch.zeros_like(weight)
            momentum = state["momentum"].lerp_(weight.grad, 1 - MOMENTUM)
            way = orthogonal(full(torch.lerp(weight.grad, momentum, MOMENTUM)))
            weight.mul_(1 - matrices["lr"] * matrices["weight_decay"])
            weight.add_(sharded(way, like=weight), alpha=-matrices["lr"] * ADAM_SIZE * math.sqrt(max(weight.shape)))


def orthogonal(matrix_RC: Tensor) -> Tensor:
    """The same with all singular values of each block about 1, by polynomials, which need products alone."""
    R, C = matrix_RC.shape
    x_NKC = F.pad(matrix_RC, (0, 0, 0, -R % BLOCK)).view(-1, BLOCK, C)  # rows of 0 stay so
    x_NKC = x_NKC / (1.02 * x_NKC.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for a, b, c in POLYNOMIALS:
        square_NKK = x_NKC @ x_NKC.mT
        x_NKC = torch.baddbmm(x_NKC, torch.baddbmm(square_NKK, square_NKK, square_NKK, beta=b, alpha=c), x_NKC, beta=a)
    return x_NKC.reshape(-1, C)[:R]
