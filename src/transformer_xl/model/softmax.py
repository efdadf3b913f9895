"""The loss of a plain softmax over a few thousand tokens, a few rows at a time: logits stay in the processor's cache and are never kept.

    forward    rows -> logits -> log of their sum, and the target's own       keeps the rows and one number of each
    backward   rows -> logits once more -> probabilities less the target      -> the gradients of the rows and, added up, of the table

One product more than autograd would make; in its place no pass over memory, where a softmax spends its time. A single piece is kept: it is still in the
cache on the way back.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl.config import NOT_A_TARGET
from transformer_xl.model import products

FEWEST = 2048
"""Tokens of a vocabulary from which on it pays: fewer fit into the cache anyway."""
CACHED = 1 << 20
"""Logits at a time."""


def softmax_loss(hidden_PE: Tensor, target_P: Tensor, *, table_VE: Tensor, bias_V: Tensor) -> Tensor:
    """[P] in nats; 0 where the target is none."""
    loss_P: Tensor = _SoftmaxLoss.apply(  # type: ignore[no-untyped-call]
        hidden_PE, table_VE, bias_V, target_P, products.rounding(hidden_PE), products.rounding_of_gradients(hidden_PE)
    )
    return loss_P


class _SoftmaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PE: Tensor,
        table_VE: Tensor,
        bias_V: Tensor,
        target_P: Tensor,
        to: torch.dtype | None,
        back: torch.dtype | None,
    ) -> Tensor:
        dtype = hidden_PE.dtype
        hidden_PE, table_VE = hidden_PE.to(to or dtype), table_VE.to(to or dtype)
        real_P = target_P != NOT_A_TARGET
        target_P = target_P.where(real_P, 0)
        loss_P: Tensor = torch.empty(len(hidden_PE), dtype=dtype, device=hidden_PE.device)
        log_sum_P = torch.empty_like(loss_P)
        pieces = _pieces(len(hidden_PE), columns=len(table_VE))
        for rows in pieces:
            logits_PV = _logits(hidden_PE[rows], table_VE, bias_V)
            log_sum_P[rows] = logits_PV.logsumexp(-1)
            own_P = logits_PV.gather(1, target_P[rows, None])[:, 0]
            loss_P[rows] = torch.where(real_P[rows], log_sum_P[rows] - own_P, 0.0)
        kept, ctx.back = (logits_PV,) if len(pieces) == 1 else (), back
        ctx.save_for_backward(hidden_PE, table_VE, bias_V, target_P, real_P, log_sum_P, *kept)
        return loss_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_P: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        hidden_PE, table_VE, bias_V, target_P, real_P, log_sum_P, *kept = ctx.saved_tensors
        gradient_P = gradient_P.where(real_P, 0.0)
        of_hidden_PE = torch.empty(hidden_PE.shape, dtype=gradient_P.dtype, device=gradient_P.device)
        of_table_VE: Tensor | None = None
        of_bias_V = torch.zeros_like(bias_V)
        for rows in _pieces(len(hidden_PE), columns=len(table_VE)):
            logits_PV = kept[0] if kept else _logits(hidden_PE[rows], table_VE, bias_V)
            of_logits_PV = (logits_PV - log_sum_P[rows, None]).exp_()
            of_logits_PV.mul_(gradient_P[rows, None])
            of_logits_PV.scatter_add_(1, target_P[rows, None], -gradient_P[rows, None])
            of_bias_V += of_logits_PV.sum(0)
            of_logits_PV = of_logits_PV.to(hidden_PE.dtype)
            of_hidden_PE[rows] = products.matmul(of_logits_PV, table_VE)
            found_VE = products.matmul(of_logits_PV.t(), hidden_PE[rows], to=ctx.back).to(gradient_P.dtype)
            of_table_VE = found_VE if of_table_VE is None else of_table_VE.add_(found_VE)
        assert of_table_VE is not None
        return of_hidden_PE, of_table_VE, of_bias_V, None, None, None


def _pieces(rows: int, *, columns: int) -> list[slice]:
    at_once = max(1, CACHED // columns)
    return [slice(first, first + at_once) for first in range(0, rows, at_once)]


def _logits(hidden_PE: Tensor, table_VE: Tensor, bias_V: Tensor) -> Tensor:
    return products.matmul(hidden_PE, table_VE.t()).to(bias_V.dtype).add_(bias_V)
