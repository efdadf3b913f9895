"""The paper's attention, fast, by one of four: chosen here, by name, and nowhere else. All must equal `reference.py`, which spells the formula out.

    native   the compiled kernels, on the CPU, for what they declare to support (`native.supports`)
    triton   those for NVIDIA cards, likewise: no scores in memory, and products with distances only while a layer is computed
    fused    torch's fused attention on an accelerator: scores are never kept, products with distances are
    torch    everything, everywhere

W_kR R is computed once per distance; `relative_shift` then reads the product of every query with every distance as a product of every
query with every key, through a view (Appendix B, without the pad and the copy).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from transformer_xl import native
from transformer_xl.config import ModelConfig
from transformer_xl.devices import to_device
from transformer_xl.model.dropout import draw_seed
from transformer_xl.model.encodings import Distances
from transformer_xl.model.layer import Attend, Layer
from transformer_xl.model.products import at_least_float32

AttentionDropout = Callable[[Tensor], Tensor]
Attention = Callable[..., Tensor]
"""`attend`, or another that takes and gives the same."""
Kernels = type[native.Attention] | type[native.TiledAttention]


class _RelativeShift(torch.autograd.Function):
    """
    columns are distances       key       m m | 0 1 2         row i of the view starts one column
    S-1 .. 0 for every row      query 0   2 1 | 0 x x         further left than row i-1, so its stride
    4 3 2 1 0                   query 1   3 2 | 1 0 x         is S-1: query i at key j reads column
                                query 2   4 3 | 2 1 0         T-1-i+j. What lies in the future (x) is
                                                              whatever the next row holds, to be masked.
    """

    @staticmethod
    def forward(ctx: object, by_distance_BHTS: Tensor) -> Tensor:
        B, H, T, S = by_distance_BHTS.shape
        return by_distance_BHTS.as_strided(
            (B, H, T, S), (H * T * S, T * S, S - 1, 1), by_distance_BHTS.storage_offset() + T - 1
        )

    @staticmethod
    def backward(ctx: object, grad_BHTS: Tensor) -> Tensor:
        # The mask gave every future cell a zero gradient. Rows of the view overlap in one cell, their last column with the next row's first,
        # and only the last row's last column is not in the future: written apart, the rest is free of overlaps.
        B, H, T, S = grad_BHTS.shape
        result_BHTS = grad_BHTS.new_zeros(B, H, T, S)
        result_BHTS.as_strided((B, H, T, S - 1), (H * T * S, T * S, S - 1, 1), T - 1).copy_(grad_BHTS[..., : S - 1])
        result_BHTS[:, :, T - 1, S - 1] = grad_BHTS[:, :, T - 1, S - 1]
        return result_BHTS


def relative_shift(by_distance_BHTS: Tensor) -> Tensor:
    """Scores by distance -> scores by key. Cells of the future hold garbage: mask them before anything else."""
    if torch.compiler.is_exporting():  # a view by strides has no counterpart in a graph for every length
        T, S = by_distance_BHTS.shape[2:]
        device = by_distance_BHTS.device
        column_TS = T - 1 - torch.arange(T, device=device)[:, None] + torch.arange(S, device=device)
        return by_distance_BHTS.gather(-1, column_TS.clamp(max=S - 1).expand(by_distance_BHTS.shape))
    if by_distance_BHTS.shape[2] == 1:  # there is nothing to shift
        return by_distance_BHTS
    shifted: Tensor = _RelativeShift.apply(by_distance_BHTS.contiguous())  # type: ignore[no-untyped-call]
    return shifted


def attend(
    query_BHTK: Tensor,
    key_BHSK: Tensor,
    value_BHSK: Tensor,
    *,
    distances: Distances,
    mask_BTS: Tensor,
    dropout: AttentionDropout,
) -> Tensor:
    """What each query gathers, [B, H, T, K]. `mask_BTS` (or [1, T, S]) is True where a query must not look."""
    content_query_BHTK, position_BHTS = queries_and_positions(query_BHTK, distances)
    score_BHTS = at_least_float32(content_query_BHTK @ key_BHSK.transpose(-1, -2))  # (a) + (c)
    if position_BHTS is not None:
        score_BHTS = score_BHTS + position_BHTS
    score_BHTS = score_BHTS.masked_fill(mask_BTS[:, None], float("-inf"))
    probability_BHTS = dropout(torch.softmax(score_BHTS, dim=-1))
    return probability_BHTS.to(value_BHSK.dtype) @ value_BHSK


def fused_attend(
    query_BHTK: Tensor,
    key_BHSK: Tensor,
    value_BHSK: Tensor,
    *,
    distances: Distances,
    mask_BTS: Tensor,
    dropout: float,
) -> Tensor:
    """The same through torch's fused attention, to which terms (b) and (d) are a bias: scores and probabilities are never kept."""
    content_query_BHTK, position_BHTS = queries_and_positions(query_BHTK, distances)
    if position_BHTS is None:
        position_BHTS = query_BHTK.new_zeros(1)
    bias_BHTS = position_BHTS.masked_fill(mask_BTS[:, None], float("-inf"))
    return F.scaled_dot_product_attention(
        content_query_BHTK, key_BHSK, value_BHSK, attn_mask=bias_BHTS, dropout_p=dropout, scale=1.0
    )


def queries_and_positions(query_BHTK: Tensor, distances: Distances) -> tuple[Tensor, Tensor | None]:
    """Queries of (a) and (c), and scores of (b) and (d) by key. The scale of the sum of all four terms is taken where it is cheapest, on what is narrowest."""
    scale = query_BHTK.shape[-1] ** -0.5
    query_BHTK = query_BHTK * scale
    content_query_BHTK = query_BHTK
    if distances.content_bias_HK is not None:
        content_query_BHTK = query_BHTK + distances.content_bias_HK[:, None] * scale
    by_distance_BHTS = None
    if distances.relative_key_HSK is not None:
        position_query_BHTK = query_BHTK
        if distances.position_bias_HK is not None:
            position_query_BHTK = query_BHTK + distances.position_bias_HK[:, None] * scale
        by_distance_BHTS = position_query_BHTK @ distances.relative_key_HSK.transpose(-1, -2)
    if distances.distance_bias_HS is not None:
        bias_1HTS = (distances.distance_bias_HS * scale)[None, :, None].expand(1, -1, query_BHTK.shape[2], -1)
        by_distance_BHTS = bias_1HTS if by_distance_BHTS is None else by_distance_BHTS + bias_1HTS
    return content_query_BHTK, None if by_distance_BHTS is None else relative_shift(by_distance_BHTS)


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys the queries of a segment must not look at."""

    memory: int
    """How many of the keys are memory."""
    segment: int
    valid_B: Tensor | None
    """How many positions of each lane's memory are real; None: all, and one mask, [1, T, S], serves every lane."""
    visible_distance: int | None
    device: torch.device

    @cached_property
    def cells_BTS(self) -> Tensor:
        """True where a query must not look: the future, what lies beyond `visible_distance`, and memory that is not real."""
        key_S = torch.arange(self.memory + self.segment, device=self.device)
        distance_TS = torch.arange(self.segment, device=self.device)[:, None] + self.memory - key_S
        mask_BTS = (distance_TS < 0)[None]
        if self.visible_distance is not None:
            mask_BTS = mask_BTS | (distance_TS > self.visible_distance)
        if self.valid_B is not None:
            assert self.lowest_B is not None
            mask_BTS = mask_BTS | (key_S < self.lowest_B[:, None])[:, None]
        return mask_BTS

    @cached_property
    def lowest_B(self) -> Tensor | None:
        """The first key of each lane that is real; None: of every lane the first."""
        if self.valid_B is None:
            return None
        return to_device(self.memory - self.valid_B, self.device)


# --- who computes

Backend = Literal["torch", "fused", "triton", "native"]


def backend_of(kernel: native.Kernel, config: ModelConfig, like: Tensor, *, training: bool = False) -> Backend:
    """`kernel`: what would compute it natively. `like`: the device and dtype of the numbers. Training has dropout."""
    # No kernel and no fused attention holds a mask of probabilities over time.
    if training and "attention" in config.locked_dropout and config.attention_dropout:
        return "torch"
    # Under autocast products are in another type than the weights, which no kernel takes.
    if native.usable(like) and native.supports(kernel, config) and not torch.is_autocast_enabled("cpu"):
        return "native"
    if kernel == "attention" and native.cuda_usable(like) and native.supports("tiles", config):
        return "triton"
    return "fused" if like.is_cuda else "torch"


def segment_attention(by: Backend | Attention, distances: Sequence[Distances], mask: Mask) -> Attend:
    """Attention of a segment over itself and its memory, as a layer wants it: by a backend, or by an attention of somebody's own."""
    if by == "native":
        return partial(_by_kernels, native.Attention, distances, mask)
    if by == "triton":
        return partial(_by_kernels, native.TiledAttention, distances, mask)
    return partial(_by_heads, attend if by == "torch" else by, distances, mask)


def from_neighbours(layer: Layer, value_BSX: Tensor, *, segment: int, reach: int | None) -> Tensor:
    """What the values of each token of the segment and of those just before it give it by themselves, [B, T, H*K]. `value_BSX` ends with the segment and is
    zero where nothing is real; `reach`: how far a token sees."""
    weight_WX = layer.neighbours_WX
    assert weight_WX is not None
    padded_BSX = F.pad(value_BSX, (0, 0, len(weight_WX) - 1, 0))
    S = padded_BSX.shape[1]
    seen = len(weight_WX) if reach is None else min(len(weight_WX), reach + 1)
    parts = [weight_WX[n] * padded_BSX[:, S - segment - n : S - n] for n in range(seen)]
    return torch.stack(parts).sum(0)


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
    mixed_BTX = mixed_BHTK.transpose(1, 2).reshape(query_BTX.shape)
    if layer.neighbours_WX is None:
        return mixed_BTX
    return mixed_BTX + _neighbours(mask, layer, memory_BMX, key_value_BTX)


def _neighbours(mask: Mask, layer: Layer, memory_BMX: Tensor | None, key_value_BTX: Tensor) -> Tensor:
    """What is added to attention, where no kernel adds it."""
    assert layer.neighbours_WX is not None
    X = key_value_BTX.shape[-1] // 2
    value_BSX = key_value_BTX[..., X:]
    if memory_BMX is not None:
        first = max(0, mask.memory - len(layer.neighbours_WX) + 1)
        near_BWX = memory_BMX[:, first:, X:]
        if mask.lowest_B is not None:
            unreal_BW = torch.arange(first, mask.memory, device=mask.device) < mask.lowest_B[:, None]
            near_BWX = near_BWX.masked_fill(unreal_BW[..., None], 0.0)
        value_BSX = torch.cat([near_BWX, value_BSX], dim=1)
    return from_neighbours(layer, value_BSX, segment=mask.segment, reach=mask.visible_distance)


def heads(layer: Layer, values_BTX: Tensor) -> Tensor:
    """[B, T, n*H*K] -> [n, B, H, T, K]."""
    B, T, H, K = *values_BTX.shape[:2], layer.config.n_head, layer.config.d_head
    return values_BTX.view(B, T, -1, H, K).permute(2, 0, 3, 1, 4)


def _by_kernels(
    kind: Kernels,
    distances: Sequence[Distances],
    mask: Mask,
    layer: Layer,
    query_BTX: Tensor,
    memory_BMX: Tensor | None,
    key_value_BTX: Tensor,
) -> Tensor:
    B, T, H, K = *query_BTX.shape[:2], layer.config.n_head, layer.config.d_head
    remembered_BMX = query_BTX.new_empty(B, 0, 2 * H * K) if memory_BMX is None else memory_BMX
    known, dropout = distances[layer.number], layer.attention_dropout
    assert known.relative_key_HSK is not None
    inside_WX = layer.neighbours_WX if kind is native.Attention else None
    mixed_BTX = kernel_attend(
        query_BTX.view(B, T, H, K),
        remembered_BMX.view(B, -1, 2, H, K),
        key_value_BTX.view(B, T, 2, H, K),
        known.relative_key_HSK.transpose(0, 1),
        known.content_bias_HK,
        known.position_bias_HK,
        None if inside_WX is None else inside_WX.view(-1, H, K),
        lowest_B=mask.lowest_B,
        visible_distance=mask.visible_distance,
        dropout=dropout.rate if layer.training else 0.0,
        kind=kind,
    ).view(B, T, H * K)
    if layer.neighbours_WX is inside_WX:
        return mixed_BTX
    return mixed_BTX + _neighbours(mask, layer, memory_BMX, key_value_BTX)


def kernel_attend(
    query_BTHK: Tensor,
    memory_key_value_BM2HK: Tensor,
    key_value_BT2HK: Tensor,
    relative_key_SHK: Tensor,
    content_bias_HK: Tensor | None,
    position_bias_HK: Tensor | None,
    neighbours_WHK: Tensor | None = None,
    *,
    lowest_B: Tensor | None,
    visible_distance: int | None,
    dropout: float,
    kind: Kernels = native.Attention,
) -> Tensor:
    """What each query gathers, [B, T, H, K]. `lowest_B`: the first key of each lane that is real (None: all are). The last row of `relative_key_SHK` is
    distance 0."""
    if lowest_B is None and kind is native.Attention:
        lowest_B = torch.zeros(len(query_BTHK), dtype=torch.int64)
    result: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        kind,
        query_BTHK.contiguous(),
        memory_key_value_BM2HK.contiguous(),
        key_value_BT2HK.contiguous(),
        relative_key_SHK.contiguous(),
        None if content_bias_HK is None else content_bias_HK.contiguous(),
        None if position_bias_HK is None else position_bias_HK.contiguous(),
        None if neighbours_WHK is None else neighbours_WHK.contiguous(),
        lowest_B,
        native.UNLIMITED if visible_distance is None else visible_distance,
        dropout,
    )
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: Any, *arguments: Any) -> Tensor:
        *tensors, limit, dropout = arguments
        ctx.kind, ctx.options = kind, {"limit": limit, "dropout": dropout, "seed": draw_seed() if dropout else 0}
        kept, out_BTHK = kind(dict(zip(native.INPUTS, tensors, strict=True)), **ctx.options).forward()
        ctx.save_for_backward(*tensors, kept, out_BTHK)
        return cast(Tensor, out_BTHK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTHK: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, kept, out_BTHK = ctx.saved_tensors
        attention = ctx.kind(dict(zip(native.INPUTS, tensors, strict=True)), **ctx.options)
        found = attention.backward(kept, out_BTHK, gradient_BTHK.contiguous())
        gradients = (None if tensor is None else gradient for tensor, gradient in zip(tensors[:-1], found, strict=True))
        return None, *gradients, None, None, None
