"""x_t = factor_t x_{t-1} + added_t along time, without a step of Python for each t: what a QRNN's pooling is.

Blocks of time are scanned side by side, each from zero; the blocks' ends are scanned the same way; and each block then gets what came before it,
multiplied by the factors up to each of its places.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 8


def linear_scan(factor_BTX: Tensor, added_BTX: Tensor, start_BX: Tensor) -> Tensor:
    """[B, T, X], given x_0 = `start_BX`."""
    result: Tensor = _Scan.apply(factor_BTX, added_BTX, start_BX)  # type: ignore[no-untyped-call]
    return result


class _Scan(torch.autograd.Function):
    """The gradient of a scan is a scan backwards in time, so nothing inside it needs to be kept."""

    @staticmethod
    def forward(ctx: Any, factor_BTX: Tensor, added_BTX: Tensor, start_BX: Tensor) -> Tensor:
        result_BTX = _scan(factor_BTX, added_BTX, start_BX)
        ctx.save_for_backward(factor_BTX, start_BX, result_BTX)
        return result_BTX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factor_BTX, start_BX, result_BTX = ctx.saved_tensors
        later_BTX = torch.cat([torch.zeros_like(factor_BTX[:, :1]), factor_BTX.flip(1)[:, :-1]], dim=1)
        added_BTX = _scan(later_BTX, gradient_BTX.flip(1), torch.zeros_like(start_BX)).flip(1)
        before_BTX = torch.cat([start_BX[:, None], result_BTX[:, :-1]], dim=1)
        return added_BTX * before_BTX, added_BTX, added_BTX[:, 0] * factor_BTX[:, 0]


def _scan(factor_BTX: Tensor, added_BTX: Tensor, start_BX: Tensor) -> Tensor:
    B, T, X = factor_BTX.shape
    whole = T - T % BLOCK if T > BLOCK else 0
    result_BTX = torch.empty_like(added_BTX)
    last_BX = start_BX
    if whole:
        shape = (B, whole // BLOCK, BLOCK, X)
        factor_BNLX = factor_BTX[:, :whole].reshape(shape)
        inside_BNLX, reach_BNLX = added_BTX[:, :whole].reshape(shape).clone(), factor_BNLX.clone()
        for place in range(1, BLOCK):
            inside_BNLX[:, :, place].addcmul_(factor_BNLX[:, :, place], inside_BNLX[:, :, place - 1])
            reach_BNLX[:, :, place].mul_(reach_BNLX[:, :, place - 1])
        ends_BNX = _scan(reach_BNLX[:, :, -1], inside_BNLX[:, :, -1], start_BX)
        before_BNX = torch.cat([start_BX[:, None], ends_BNX[:, :-1]], dim=1)
        result_BTX[:, :whole] = inside_BNLX.addcmul_(reach_BNLX, before_BNX[:, :, None]).view(B, whole, X)
        last_BX = ends_BNX[:, -1]
    for t in range(whole, T):
        last_BX = torch.addcmul(added_BTX[:, t], factor_BTX[:, t], last_BX)
        result_BTX[:, t] = last_BX
    return result_BTX
