"""The door to the kernel of a loss over a vocabulary (`losses.cpp`)."""

import torch
from torch import Tensor

from transformer_xl.native import doors


def softmax_loss(logits_PV: Tensor, bias_V: Tensor, target_P: Tensor, *, of_bias_V: Tensor) -> Tensor:
    """[P] in nats, 0 where the target is -1, for none. In place of the logits, which come without their bias and may be bfloat16, stands then the gradient of
    each row's own loss; `of_bias_V` is added to."""
    rounded, (P, V) = logits_PV.dtype is torch.bfloat16, doors._sizes("logits", logits_PV, 2)
    dtype = torch.float32 if rounded else logits_PV.dtype
    loss_P = torch.empty(P, dtype=dtype)
    places = (
        doors._place("logits", logits_PV, logits_PV.dtype, (P, V)),
        doors._place("a bias", bias_V, dtype, (V,)),
        doors._place("targets", target_P, torch.int64, (P,)),
        loss_P.data_ptr(),
        doors._place("a bias' gradient", of_bias_V, dtype, (V,)),
    )
    doors._call("rounded_softmax_loss" if rounded else "softmax_loss", dtype, *places, P, V)
    return loss_P
