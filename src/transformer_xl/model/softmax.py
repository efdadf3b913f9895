"""The loss of a plain softmax over a few thousand tokens, a few rows at a time: logits stay in the processor's cache and are never kept.

    forward    rows -> logits -> losses, and at once each loss's own gradient of its logits -> gradients of the rows and, added up, of the table
    backward   those gradients, times what the losses count

Every loss of a training counts the same, so nothing has to be computed again on the way back, and no pass is made over memory, where a softmax spends its
time. Where losses count differently, all of it is done once more, with what each counts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl import native
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
        given = (hidden_PE.to(to or dtype), table_VE.to(to or dtype), bias_V, target_P)
        ctx.how = {"back": back, "table_learns": ctx.needs_input_grad[1]}
        loss_P, *gradients = _with_gradients(*given, **ctx.how)
        ctx.save_for_backward(*given, *gradients)
        return loss_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_P: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None, None, None]:
        *given, of_hidden_PE, of_table_VE, of_bias_V = ctx.saved_tensors
        counts_P = gradient_P[given[-1] != NOT_A_TARGET]
        if len(counts_P) and (counts_P != counts_P[0]).any():
            _, of_hidden_PE, of_table_VE, of_bias_V = _with_gradients(*given, **ctx.how, counts_P=gradient_P)
        else:
            count = counts_P[0] if len(counts_P) else gradient_P.new_zeros(())
            of_hidden_PE, of_bias_V = of_hidden_PE * count, of_bias_V * count
            of_table_VE = None if of_table_VE is None else of_table_VE * count
        return of_hidden_PE, of_table_VE, of_bias_V, None, None, None


def _with_gradients(
    hidden_PE: Tensor,
    table_VE: Tensor,
    bias_V: Tensor,
    target_P: Tensor,
    *,
    back: torch.dtype | None,
    table_learns: bool,
    counts_P: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Losses [P]; and what their sum gives rows, table and bias, each times what it counts (None: 1)."""
    dtype = bias_V.dtype
    loss_P = torch.empty(len(hidden_PE), dtype=dtype, device=hidden_PE.device)
    of_hidden_PE = torch.empty(hidden_PE.shape, dtype=dtype, device=hidden_PE.device)
    of_table_VE: Tensor | None = None
    of_bias_V = torch.zeros_like(bias_V)
    by = native.softmax_loss if native.usable(bias_V) else slow_loss
    at_once = max(1, CACHED // len(table_VE))
    for first in range(0, len(hidden_PE), at_once):
        rows = slice(first, first + at_once)
        # Logits, and then in their place what each loss gives them.
        logits_PV = products.matmul(hidden_PE[rows], table_VE.t())
        counted_V = of_bias_V if counts_P is None else torch.zeros_like(bias_V)
        loss_P[rows] = by(logits_PV, bias_V, target_P[rows], of_bias_V=counted_V)
        if counts_P is not None:
            logits_PV.mul_(counts_P[rows, None])
            of_bias_V += logits_PV.sum(0)
        of_hidden_PE[rows] = products.matmul(logits_PV, table_VE)
        if table_learns:
            found_VE = products.matmul(logits_PV.t(), hidden_PE[rows], to=back).to(dtype)
            of_table_VE = found_VE if of_table_VE is None else of_table_VE.add_(found_VE)
    return loss_P, of_hidden_PE, of_table_VE, of_bias_V


def slow_loss(logits_PV: Tensor, bias_V: Tensor, target_P: Tensor, *, of_bias_V: Tensor) -> Tensor:
    """What the kernel computes, by torch."""
    real_P = target_P != NOT_A_TARGET
    at_P1 = target_P.where(real_P, 0)[:, None]
    whole_PV = logits_PV.to(bias_V.dtype) + bias_V
    log_sum_P = whole_PV.logsumexp(-1)
    loss_P = torch.where(real_P, log_sum_P - whole_PV.gather(1, at_P1)[:, 0], 0.0)
    of_logits_PV = (whole_PV - log_sum_P[:, None]).exp_()
    of_logits_PV.scatter_add_(1, at_P1, of_logits_PV.new_full(at_P1.shape, -1.0))
    of_logits_PV.masked_fill_(~real_P[:, None], 0.0)
    of_bias_V += of_logits_PV.sum(0)
    logits_PV.copy_(of_logits_PV)
    return loss_P
