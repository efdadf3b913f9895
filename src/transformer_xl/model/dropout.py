"""Dropout where the original has it, each either drawn anew for every position or locked over time (variational)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Dropout(nn.Module):
    def __init__(self, rate: float, *, locked: bool) -> None:
        super().__init__()
        self.rate = rate
        self.locked = locked

    def forward(self, values: Tensor, time_axis: int) -> Tensor:
        """`time_axis` is the one along which a locked mask does not change."""
        if not self.training or self.rate == 0.0:
            return values
        if not self.locked:
            return F.dropout(values, self.rate)
        shape = list(values.shape)
        shape[time_axis] = 1
        return values * F.dropout(values.new_ones(shape), self.rate)

    def extra_repr(self) -> str:
        return f"{self.rate}{', locked' if self.locked else ''}"


def word_dropout(tokens_BT: Tensor, *, rate: float, vocabulary: int, like: Tensor) -> Tensor:
    """A factor for each embedded token: a dropped word is 0 wherever it occurs, the others are scaled up."""
    keep_V1 = F.dropout(torch.ones(vocabulary, 1, dtype=like.dtype, device=like.device), rate)
    return F.embedding(tokens_BT, keep_V1)
