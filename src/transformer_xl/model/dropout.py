"""Dropout where the original has it, each either drawn anew for every position or locked over time (variational)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from transformer_xl import native
from transformer_xl.config import ModelConfig


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
            return dropped(values, self.rate)
        shape = list(values.shape)
        shape[time_axis] = 1
        return values * F.dropout(values.new_ones(shape), self.rate)

    def after_relu(self, values: Tensor, time_axis: int) -> Tensor:
        """Of relu(values); where it can, in one go, which keeps nothing for the way back but the result."""
        if not self.training or self.rate == 0.0 or self.locked or not native.usable(values):
            return self.forward(F.relu(values), time_axis)
        result: Tensor = _ReluDrop.apply(values.contiguous(), self.rate, draw_seed())  # type: ignore[no-untyped-call]
        return result

    def extra_repr(self) -> str:
        return f"{self.rate}{', locked' if self.locked else ''}"


def dropout_at(config: ModelConfig, site: str) -> Dropout:
    return Dropout(config.dropout_rate(site), locked=site in config.locked_dropout)


def dropped(values: Tensor, rate: float) -> Tensor:
    """As torch's dropout in training. The kernels draw a mask in a tenth of its time, and draw it again in the backward pass instead of keeping it."""
    if not native.usable(values):
        return F.dropout(values, rate)
    result: Tensor = _Drop.apply(values.contiguous(), rate, draw_seed())  # type: ignore[no-untyped-call]
    return result


def draw_seed() -> int:
    """From torch's generator, so that a resumed run draws what it would have drawn."""
    return int(torch.randint(1 << 62, ()).item())


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rate: float, seed: int) -> Tensor:
        ctx.rate, ctx.seed = rate, seed
        return native.drop(values, rate, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return native.drop(gradient.contiguous(), ctx.rate, ctx.seed), None, None


class _ReluDrop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rate: float, seed: int) -> Tensor:
        result = native.drop(values, rate, seed, relu=True)
        ctx.rate = rate
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (result,) = ctx.saved_tensors
        return native.relu_drop_backward(result, gradient.contiguous(), ctx.rate), None, None


def word_dropout(tokens_BT: Tensor, *, rate: float, vocabulary: int, like: Tensor) -> Tensor:
    """A factor for each embedded token: a dropped word is 0 wherever it occurs, the others are scaled up."""
    keep_V1 = F.dropout(torch.ones(vocabulary, 1, dtype=like.dtype, device=like.device), rate)
    return F.embedding(tokens_BT, keep_V1)
