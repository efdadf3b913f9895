"""The paper's attention by the compiled kernels of `native/training.cpp`, forwards and backwards; `attention.attend` gives the same with torch alone."""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl import native
from transformer_xl.model.dropout import draw_seed
from transformer_xl.native import address, at

UNLIMITED = 1 << 40


class Shape(ctypes.Structure):
    """The struct of the same name in training.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("lanes", "queries", "memory", "heads", "width", "limit", "groups")),
        ("dropout", ctypes.c_double),
        ("seed", ctypes.c_uint64),
    )


class Inputs(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("query", "memory_key_value", "key_value", "relative", "content_bias", "position_bias", "lowest")
    )


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
        UNLIMITED if visible_distance is None else visible_distance,
        dropout,
    )
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BTHK: Tensor,
        memory_key_value_BM2HK: Tensor,
        key_value_BT2HK: Tensor,
        relative_key_SHK: Tensor,
        content_bias_HK: Tensor | None,
        position_bias_HK: Tensor | None,
        lowest_B: Tensor,
        limit: int,
        dropout: float,
    ) -> Tensor:
        B, T, H, K = query_BTHK.shape
        M = memory_key_value_BM2HK.shape[1]
        threads = torch.get_num_threads()
        shape = Shape(
            lanes=B,
            queries=T,
            memory=M,
            heads=H,
            width=K,
            limit=limit,
            groups=min(B, max(1, -(-threads // H))),
            dropout=dropout,
            seed=draw_seed() if dropout else 0,
        )
        tensors = (query_BTHK, memory_key_value_BM2HK, key_value_BT2HK, relative_key_SHK)
        biases = (content_bias_HK, position_bias_HK)
        inputs = Inputs(*(address(part) for part in (*tensors, *biases, lowest_B)))
        probability_BHTS = query_BTHK.new_empty(B, H, T, M + T)
        out_BTHK = torch.empty_like(query_BTHK)
        places = (ctypes.byref(shape), ctypes.byref(inputs), at(probability_BHTS), at(out_BTHK))
        native.call("attend_forward", query_BTHK.dtype, *places)
        ctx.save_for_backward(*tensors, *biases, lowest_B, probability_BHTS, out_BTHK)
        ctx.shape = shape
        return out_BTHK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTHK: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, content_bias_HK, position_bias_HK, lowest_B, probability_BHTS, out_BTHK = ctx.saved_tensors
        query_BTHK, memory_BM2HK, key_value_BT2HK, relative_SHK = tensors
        inputs = Inputs(*(address(part) for part in (*tensors, content_bias_HK, position_bias_HK, lowest_B)))
        G, (H, K) = ctx.shape.groups, query_BTHK.shape[2:]
        gradients = [torch.empty_like(tensor) for tensor in (query_BTHK, memory_BM2HK, key_value_BT2HK)]
        relative_GSHK = relative_SHK.new_empty(G, *relative_SHK.shape)
        biases = [query_BTHK.new_empty(G, H, K) for _ in range(2)]
        places = (probability_BHTS, out_BTHK, gradient_BTHK.contiguous(), *gradients, relative_GSHK, *biases)
        native.call(
            "attend_backward",
            query_BTHK.dtype,
            ctypes.byref(ctx.shape),
            ctypes.byref(inputs),
            *(at(part) for part in places),
        )
        of_biases = [
            None if bias_HK is None else gradient_GHK.sum(0)
            for bias_HK, gradient_GHK in zip((content_bias_HK, position_bias_HK), biases, strict=True)
        ]
        return *gradients, relative_GSHK.sum(0), *of_biases, None, None, None
