"""The vanilla model's step, as fast as we can make it: what memory is compared with must not be slow for want of care."""

from typing import cast

import torch
from torch import Tensor

from transformer_xl.model import TransformerXL
from transformer_xl.model.attention import hidden_keys
from transformer_xl.model.transformer import Layer


@torch.inference_mode()
def window_step(model: TransformerXL, tokens_BT: Tensor) -> Tensor:
    """The last layer's output at the last position of a window without memory, [B, D]; in the last layer nobody else asks."""
    T = tokens_BT.shape[1]
    hidden_1TT = hidden_keys(memory=0, segment=T, valid_B=None, visible_distance=None, device=tokens_BT.device)
    distances = model.encoding.distances(T)
    hidden_BTD = model.encoding.enter_first(model.vocabulary.embed(tokens_BT))
    *lower, last = cast(list[Layer], list(model.layers))
    nothing_BMD = hidden_BTD[:, :0]
    for number, layer in enumerate(lower):
        hidden_BTD = layer(hidden_BTD, nothing_BMD, distances[number], hidden_1TT, model.attend)
    prepared_BTD = last.prepared(hidden_BTD)
    key_BHTK, value_BHTK = last.keys_and_values(prepared_BTD)
    hidden_B1D = last.answer(
        hidden_BTD[:, -1:], prepared_BTD[:, -1:], key_BHTK, value_BHTK, distances[-1], hidden_1TT[:, -1:], model.attend
    )
    if model.final_norm is not None:
        hidden_B1D = model.final_norm(hidden_B1D)
    return hidden_B1D[:, 0]
