"""Who computes: torch's own operations, its fused attention, or the compiled kernels. Chosen here, by name, and nowhere else.

native   the kernels, on the CPU, for what they declare to support (`native.supports`)
fused    torch's fused attention on an accelerator: scores are never kept
torch    everything, everywhere; what the other two must equal
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from transformer_xl import native
from transformer_xl.config import ModelConfig
from transformer_xl.model.attention import Attention, Mask, attend, fused_attend
from transformer_xl.model.dropout import draw_seed
from transformer_xl.model.encodings import Distances
from transformer_xl.model.layer import Attend, Layer

Backend = Literal["torch", "fused", "native"]


def backend_of(kernel: native.Kernel, config: ModelConfig, like: Tensor, *, training: bool = False) -> Backend:
    """`kernel`: what would compute it natively. `like`: the device and dtype of the numbers. Training has dropout."""
    # No kernel and no fused attention holds a mask of probabilities over time.
    if training and "attention" in config.locked_dropout and config.attention_dropout:
        return "torch"
    # Under autocast products are in another type than the weights, which no kernel takes.
    if native.usable(like) and native.supports(kernel, config) and not torch.is_autocast_enabled("cpu"):
        return "native"
    return "fused" if like.is_cuda else "torch"


def segment_attention(by: Backend | Attention, distances: Sequence[Distances], mask: Mask) -> Attend:
    """Attention of a segment over itself and its memory, as a layer wants it: by a backend, or by an attention of somebody's own."""
    if by == "native":
        return partial(_natively, distances, mask)
    return partial(_by_heads, attend if by == "torch" else by, distances, mask)


def _by_heads(
    by: Attention | Literal["fused"],
    distances: Sequence[Distances],
    mask: Mask,
    layer: Layer,
    query_BTX: Tensor,
    memory_BMX: Tensor | None,
    key_value_BTX: Tensor,
) -> Tensor:
    key_value_BSX = key_value_BTX if memory_BMX is None else torch.cat([memory_BMX, key_value_BTX], dim=1)
    (query_BHTK,), (key_BHSK, value_BHSK) = heads(layer, query_BTX), heads(layer, key_value_BSX)
    seen: dict[str, Any] = {"distances": distances[layer.number], "mask_BTS": mask.cells_BTS}
    dropout = layer.attention_dropout
    if by == "fused":
        rate = dropout.rate if layer.training else 0.0
        mixed_BHTK = fused_attend(query_BHTK, key_BHSK, value_BHSK, **seen, dropout=rate)
    else:
        mixed_BHTK = by(query_BHTK, key_BHSK, value_BHSK, **seen, dropout=partial(dropout, time_axis=2))
    return mixed_BHTK.transpose(1, 2).reshape(query_BTX.shape)


def heads(layer: Layer, values_BTX: Tensor) -> Tensor:
    """[B, T, n*H*K] -> [n, B, H, T, K]."""
    B, T, H, K = *values_BTX.shape[:2], layer.config.n_head, layer.config.d_head
    return values_BTX.view(B, T, -1, H, K).permute(2, 0, 3, 1, 4)


def _natively(
    distances: Sequence[Distances],
    mask: Mask,
    layer: Layer,
    query_BTX: Tensor,
    memory_BMX: Tensor | None,
    key_value_BTX: Tensor,
) -> Tensor:
    B, T, H, K = *query_BTX.shape[:2], layer.config.n_head, layer.config.d_head
    memory_BMX = query_BTX.new_empty(B, 0, 2 * H * K) if memory_BMX is None else memory_BMX
    known, dropout = distances[layer.number], layer.attention_dropout
    assert known.relative_key_HSK is not None
    return native_attend(
        query_BTX.view(B, T, H, K),
        memory_BMX.view(B, -1, 2, H, K),
        key_value_BTX.view(B, T, 2, H, K),
        known.relative_key_HSK.transpose(0, 1),
        known.content_bias_HK,
        known.position_bias_HK,
        lowest_B=mask.lowest_B(B),
        visible_distance=mask.visible_distance,
        dropout=dropout.rate if layer.training else 0.0,
    ).view(B, T, H * K)


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
