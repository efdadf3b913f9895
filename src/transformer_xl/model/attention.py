"""The paper's attention, fast. It must equal `reference.py`, which spells the same formula out term by term.

W_kR R is computed once per distance; `relative_shift` then reads the product of every query with every distance as a product of every
query with every key, through a view (Appendix B, without the pad and the copy).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from transformer_xl.model.encodings import Distances

AttentionDropout = Callable[[Tensor], Tensor]
Attention = Callable[..., Tensor]
"""`attend`, or another that takes and gives the same."""


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
        column_TS = T - 1 - torch.arange(T)[:, None] + torch.arange(S)
        return by_distance_BHTS.gather(-1, column_TS.clamp(max=S - 1).expand(by_distance_BHTS.shape))
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
    content_query_BHTK, position_BHTS = _queries_and_positions(query_BHTK, distances)
    score_BHTS = content_query_BHTK @ key_BHSK.transpose(-1, -2)  # (a) + (c)
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
    content_query_BHTK, position_BHTS = _queries_and_positions(query_BHTK, distances)
    if position_BHTS is None:
        position_BHTS = query_BHTK.new_zeros(1)
    bias_BHTS = position_BHTS.masked_fill(mask_BTS[:, None], float("-inf"))
    return F.scaled_dot_product_attention(
        content_query_BHTK, key_BHSK, value_BHSK, attn_mask=bias_BHTS, dropout_p=dropout, scale=1.0
    )


def _queries_and_positions(query_BHTK: Tensor, distances: Distances) -> tuple[Tensor, Tensor | None]:
    """Queries of (a) and (c), and scores of (b) and (d) by key. The scale of the sum of all four terms is taken where it is cheapest, on what is narrowest."""
    scale = query_BHTK.shape[-1] ** -0.5
    query_BHTK = query_BHTK * scale
    content_query_BHTK = query_BHTK
    if distances.content_bias_HK is not None:
        content_query_BHTK = query_BHTK + distances.content_bias_HK[:, None] * scale
    if distances.relative_key_HSK is None:
        return content_query_BHTK, None
    position_query_BHTK = query_BHTK
    if distances.position_bias_HK is not None:
        position_query_BHTK = query_BHTK + distances.position_bias_HK[:, None] * scale
    by_distance_BHTS = position_query_BHTK @ distances.relative_key_HSK.transpose(-1, -2)
    if distances.distance_bias_HS is not None:
        by_distance_BHTS = by_distance_BHTS + distances.distance_bias_HS[:, None] * scale
    return content_query_BHTK, relative_shift(by_distance_BHTS)


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
            unreal_BS = key_S < (self.memory - self.valid_B.to(self.device))[:, None]
            mask_BTS = mask_BTS | unreal_BS[:, None]
        return mask_BTS

    def lowest_B(self, lanes: int) -> Tensor:
        """The first key of each lane that is real."""
        return torch.zeros(lanes, dtype=torch.int64) if self.valid_B is None else self.memory - self.valid_B
