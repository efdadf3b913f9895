"""The door to the kernels of learning while reading (`adapting.cpp`): weights that move, and what a cache gives each token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_xl.errors import InputError
from transformer_xl.native import doors
from transformer_xl.native.structures import Moving


class MovingWeights:
    """Weights that go a step after each segment, with what stands still beside them. They are looked at once, here; what is pointed at stays alive."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        trained: Sequence[Tensor],
        *,
        inverse: Sequence[Tensor] = (),
        back: Sequence[Tensor] = (),
    ) -> None:
        """`inverse`: what gradients are multiplied by; empty: by 1. `back`: the share that each goes back to `trained`; empty: what `move` is told."""
        self.dtype = weights[0].dtype
        self._alive = [weights, trained, inverse, back]
        self._shapes = [tuple(weight.shape) for weight in weights]
        self._parts = (Moving * len(weights))()
        for name, tensors in (("weight", weights), ("trained", trained), ("inverse", inverse), ("back", back)):
            if len(tensors) not in (0, len(weights)):
                raise InputError(f"a kernel was given {len(tensors)} tensors of {name}, for {len(weights)} weights")
            for part, tensor, shape in zip(self._parts, tensors, self._shapes, strict=False):
                setattr(part, name, doors._place(name, tensor, self.dtype, shape))
                part.count = tensor.numel()

    def move(self, gradients: Sequence[Tensor | None], *, rate: float, decay: float) -> bool:
        """In place. False where a gradient is not finite: then all stay as they are."""
        for part, gradient, shape in zip(self._parts, gradients, self._shapes, strict=True):
            part.gradient = doors._optional("a gradient", gradient, self.dtype, shape)
        moved = torch.zeros(1, dtype=torch.int64)
        doors._call("move_weights", self.dtype, self._parts, len(self._parts), rate, decay, moved.data_ptr())
        return bool(moved)


def recall(score_TS: Tensor, next_S: Tensor, target_T: Tensor, *, past: int, size: int, theta: float) -> Tensor:
    """[T]: what a softmax of theta times its scores gives each row's target, which stands in `next_S`. Row t sees the last `size` of the columns before
    past + t; not a number where there are none."""
    dtype, (T, S) = score_TS.dtype, doors._sizes("scores", score_TS, 2)
    share_T = score_TS.new_empty(T)
    places = (
        doors._place("scores", score_TS, dtype, (T, S)),
        doors._place("tokens", next_S, torch.int64, (S,)),
        doors._place("targets", target_T, torch.int64, (T,)),
        share_T.data_ptr(),
    )
    doors._call("recall", dtype, *places, T, S, past, size, theta)
    return share_T
