"""The loss of a softmax over one large table that the input reads too, with one gradient for the whole table.

Left to autograd, each cluster's slice would be given a gradient of the table's full size, mostly zeros, the input's rows another, and these would be
added up: for the paper's 267,735 words 439 MB each. Here every row is written once:

    backward   loss: writes all rows into one tensor, and keeps it     embedding: adds the rows that were read, and hands it over
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl import native
from transformer_xl.config import NOT_A_TARGET
from transformer_xl.model import products


class TableGradient:
    """What the losses of one pass have found for the table, until the embedding of the same pass takes it."""

    found_VE: Tensor | None = None

    def __init__(self, spare_VE: Tensor | None = None) -> None:
        """`spare_VE`: a gradient that nobody needs any more, to be written over. Fresh memory of that size costs as much as the products."""
        self.spare_VE = spare_VE

    def room(self, table_VE: Tensor, *, dtype: torch.dtype) -> Tensor:
        spare_VE, self.spare_VE = self.spare_VE, None
        return torch.empty_like(table_VE, dtype=dtype) if spare_VE is None else spare_VE

    def add(self, gradient_VE: Tensor) -> None:
        self.found_VE = gradient_VE if self.found_VE is None else self.found_VE.add_(gradient_VE)


def embed_rows(tokens_BT: Tensor, *, table_VE: Tensor, gradient: TableGradient) -> Tensor:
    """[B, T, E]. What `adaptive_loss` leaves in `gradient` reaches the table through here."""
    rows_BTE: Tensor = _Rows.apply(table_VE, tokens_BT, gradient)  # type: ignore[no-untyped-call]
    return rows_BTE


def adaptive_loss(
    hidden_PE: Tensor,
    target_P: Tensor,
    *,
    table_VE: Tensor,
    bias_V: Tensor,
    tail_weight_CE: Tensor | None,
    tail_bias_C: Tensor | None,
    edges: tuple[int, ...],
    places: Sequence[Tensor],
    gradient: TableGradient,
) -> Tensor:
    """[P] in nats; 0 where the target is none. `places`: where the targets of each tail stand. `hidden_PE` stands in the table's own width, and
    comes from `embed_rows` with the same `gradient`. Under autocast products are in its type; what they are added to, their softmax and the table's
    gradient stay in the table's."""
    device = hidden_PE.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with torch.autocast(device, enabled=False):
        loss_P: Tensor = _AdaptiveLoss.apply(  # type: ignore[no-untyped-call]
            hidden_PE if half is None else hidden_PE.to(half),
            table_VE.detach(),
            bias_V,
            tail_weight_CE,
            tail_bias_C,
            target_P,
            edges,
            places,
            gradient,
        )
    return loss_P


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_VE: Tensor, tokens_BT: Tensor, gradient: TableGradient) -> Tensor:
        ctx.save_for_backward(tokens_BT)
        ctx.shape, ctx.gradient = table_VE.shape, gradient
        return table_VE.index_select(0, tokens_BT.reshape(-1)).view(*tokens_BT.shape, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTE: Tensor) -> tuple[Tensor, None, None]:
        (tokens_BT,) = ctx.saved_tensors
        found_VE, ctx.gradient.found_VE = ctx.gradient.found_VE, None
        if found_VE is None:
            found_VE = gradient_BTE.new_zeros(ctx.shape)
        return found_VE.index_add_(0, tokens_BT.reshape(-1), gradient_BTE.flatten(0, 1)), None, None


class _AdaptiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PE: Tensor,
        table_VE: Tensor,
        bias_V: Tensor,
        tail_weight_CE: Tensor | None,
        tail_bias_C: Tensor | None,
        target_P: Tensor,
        edges: tuple[int, ...],
        places: Sequence[Tensor],
        gradient: TableGradient,
    ) -> Tensor:
        head = edges[1]
        column_P = target_P.clone()
        for cluster, place_P in enumerate(places, start=1):
            column_P.index_fill_(0, place_P, head + cluster - 1)
        scored_P = target_P != NOT_A_TARGET
        ctx.dtype, table_VE = table_VE.dtype, table_VE.to(hidden_PE.dtype)
        logits_PH = bias_V.new_empty(len(hidden_PE), head + len(places))
        _add_product(bias_V[:head], hidden_PE, table_VE[:head].t(), out=logits_PH[:, :head])
        if tail_weight_CE is not None and tail_bias_C is not None:
            tail_weight_CE = tail_weight_CE.to(hidden_PE.dtype)
            _add_product(tail_bias_C, hidden_PE, tail_weight_CE.t(), out=logits_PH[:, head:])
        loss_P, head_PH = _cross_entropy(logits_PH, column_P.clamp(min=0))
        loss_P = loss_P * scored_P
        tails = []
        for cluster, place_P in enumerate(places, start=1):
            low, high = edges[cluster : cluster + 2]
            logits_PV = _linear(hidden_PE[place_P], table_VE[low:high], bias_V[low:high])
            tail_loss_P, tail_PV = _cross_entropy(logits_PV, target_P[place_P] - low)
            loss_P = loss_P.index_add(0, place_P, tail_loss_P)
            tails.append(tail_PV)
        ctx.save_for_backward(hidden_PE, table_VE, tail_weight_CE, scored_P, head_PH, *places, *tails)
        ctx.edges, ctx.gradient, ctx.to = edges, gradient, products.rounding_of_gradients(hidden_PE)
        return loss_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_P: Tensor) -> tuple[Tensor | None, ...]:
        hidden_PE, table_VE, tail_weight_CE, scored_P, head_PH, *rest = ctx.saved_tensors
        edges, count = ctx.edges, len(rest) // 2
        places, tails = rest[:count], rest[count:]
        head = edges[1]
        table_gradient_VE = ctx.gradient.room(table_VE, dtype=ctx.dtype)
        bias_gradient_V = table_gradient_VE.new_zeros(len(table_VE))
        weighted_PH = head_PH * (gradient_P * scored_P)[:, None]
        bias_gradient_V[:head] = weighted_PH[:, :head].sum(0)
        tail_bias_gradient_C = weighted_PH[:, head:].sum(0)
        weighted_PH = weighted_PH.to(hidden_PE.dtype)
        own_PH, tail_PC = weighted_PH[:, :head], weighted_PH[:, head:]
        hidden_gradient_PE = products.matmul(own_PH, table_VE[:head])
        _product(own_PH.t(), hidden_PE, out=table_gradient_VE[:head], to=ctx.to)
        for cluster, (place_P, tail_PV) in enumerate(zip(places, tails, strict=True), start=1):
            low, high = edges[cluster : cluster + 2]
            if not len(place_P):
                table_gradient_VE[low:high].zero_()
                continue
            weighted_PV = tail_PV * gradient_P[place_P, None]
            bias_gradient_V[low:high] = weighted_PV.sum(0)
            weighted_PV = weighted_PV.to(hidden_PE.dtype)
            parts = (hidden_PE[place_P], table_VE[low:high], table_gradient_VE[low:high])
            found_PE = _back(weighted_PV, *parts, to=ctx.to)
            hidden_gradient_PE.index_add_(0, place_P, found_PE)
        ctx.gradient.add(table_gradient_VE)
        if tail_weight_CE is None:
            return hidden_gradient_PE, None, bias_gradient_V, *(None,) * 6
        hidden_gradient_PE.addmm_(tail_PC, tail_weight_CE)
        tail_gradients = ((tail_PC.t() @ hidden_PE).to(ctx.dtype), tail_bias_gradient_C)
        return hidden_gradient_PE, None, bias_gradient_V, *tail_gradients, *(None,) * 4


def _linear(x_PE: Tensor, matrix_VE: Tensor, bias_V: Tensor) -> Tensor:
    if _few(x_PE) and len(x_PE):
        return native.linear(x_PE, matrix_VE, None, bias_V)
    return _add_product(bias_V, x_PE, matrix_VE.t(), out=bias_V.new_empty(len(x_PE), len(bias_V)))


def _add_product(bias_V: Tensor, x_PE: Tensor, matrix_EV: Tensor, *, out: Tensor) -> Tensor:
    return torch.add(products.matmul(x_PE, matrix_EV), bias_V, out=out)


def _product(a_VP: Tensor, b_PE: Tensor, *, out: Tensor, to: torch.dtype | None = None) -> None:
    if a_VP.dtype == out.dtype and to is None:
        torch.mm(a_VP, b_PE, out=out)
    else:
        out.copy_(a_VP.to(to or a_VP.dtype) @ b_PE.to(to or b_PE.dtype))


def _back(
    gradient_PV: Tensor, x_PE: Tensor, matrix_VE: Tensor, matrix_gradient_VE: Tensor, *, to: torch.dtype | None = None
) -> Tensor:
    """The gradient of what was multiplied; that of the matrix is written where it shall stand."""
    if _few(x_PE):
        return native.few_backward(gradient_PV, x_PE, matrix_VE, matrix_gradient_VE)
    _product(gradient_PV.t(), x_PE, out=matrix_gradient_VE, to=to)
    return products.matmul(gradient_PV, matrix_VE)


def _few(x_PE: Tensor) -> bool:
    """Then the kernels are faster than torch: reading a large matrix is the work, and they read it once."""
    return len(x_PE) <= native.FEW and native.usable(x_PE)


def _cross_entropy(logits_PV: Tensor, column_P: Tensor) -> tuple[Tensor, Tensor]:
    """Losses, and the losses' gradients by the logits: probabilities minus one at the target."""
    log_PV = torch.log_softmax(logits_PV, dim=-1)
    loss_P = -log_PV.gather(1, column_P[:, None]).squeeze(1)
    probability_PV = log_PV.exp_()
    probability_PV.scatter_add_(1, column_P[:, None], -torch.ones_like(loss_P)[:, None])
    return loss_P, probability_PV
