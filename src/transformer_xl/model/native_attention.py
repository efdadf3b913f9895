"""The paper's attention by the compiled kernels of `native/training.cpp`, forwards and backwards; `attention.attend` gives the same with torch alone."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl import native
from transformer_xl.model.dropout import draw_seed


def native_attend(
    query_BTHK: Tensor,
    memory_key_value_BM2HK: Tensor,
    key_value_BT2HK: Tensor,
    relative_key_SHK: Tensor,
    content_bias_HK: Tensor | None,
    position_bias_HK: Tensor | None,
    *,
    lowest_B: Tensor,
    visible_distance: int | None,
    dropout: float,
) -> Tensor:
    """What each query gathers, [B, T, H, K]. `lowest_B`: the first key of each lane that is real. The last row of `relative_key_SHK` is distance 0."""
    result: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query_BTHK.contiguous(),
        memory_key_value_BM2HK.contiguous(),
        key_value_BT2HK.contiguous(),
        relative_key_SHK.contiguous(),
        None if content_bias_HK is None else content_bias_HK.contiguous(),
        None if position_bias_HK is None else position_bias_HK.contiguous(),
        lowest_B,
        native.UNLIMITED if visible_distance is None else visible_distance,
        dropout,
    )
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, limit, dropout = arguments
        ctx.options = {"limit": limit, "dropout": dropout, "seed": draw_seed() if dropout else 0}
        attention = native.Attention(dict(zip(native.INPUTS, tensors, strict=True)), **ctx.options)
        probability_BHTS, out_BTHK = attention.forward()
        ctx.save_for_backward(*tensors, probability_BHTS, out_BTHK)
        return out_BTHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTHK: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, probability_BHTS, out_BTHK = ctx.saved_tensors
        attention = native.Attention(dict(zip(native.INPUTS, tensors, strict=True)), **ctx.options)
        found = attention.backward(probability_BHTS, out_BTHK, gradient_BTHK.contiguous())
        gradients = (None if tensor is None else gradient for tensor, gradient in zip(tensors[:-1], found, strict=True))
        return *gradients, None, None, None
