"""A segment through the layers, with the past in one of transformers' caches: keys and values as they were projected, never hidden states.

    columns     z z z | k k k k | 0 1 2 3      z: what a stream starts with, where that is zeros (`initial_memory`)
    lane 0      z z z | a b c d | e f g h      k: what the cache keeps, at most as many as a token looks back
    lane 1      z z z | . . i j | k l m n      .: padding, hidden; or, where streams start with zeros, made to be those zeros

A token sees itself and as many before it as its model remembers, however the text is cut into calls; so calls of any lengths, and none but one, give the
same numbers as `inference.Engine`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from transformer_xl.huggingface.configuration import reach_of
from transformer_xl.model import TransformerXL
from transformer_xl.model.attention import Mask, attend, from_neighbours, heads
from transformer_xl.model.encodings import Distances
from transformer_xl.model.layer import Layer


def distances_needed(model: TransformerXL, tokens: int, *, cache: Cache | None) -> int:
    """The longest row of distances that this call and the shorter ones after it will ask for."""
    reach = reach_of(model.config)
    if cache is None and model.config.initial_memory == "empty":
        return tokens
    return tokens + (reach or 0)


def read_segment(
    model: TransformerXL,
    tokens_BT: Tensor,
    *,
    real_BP: Tensor | None,
    cache: Cache | None,
    distances: Sequence[Distances],
    recent_BP: Tensor | None = None,
) -> Tensor:
    """The last layer's output, [B, T, D]; `cache` has read the tokens afterwards. `recent_BP`: the tokens before them, for models that embed runs of tokens.

    `real_BP` is False at padding and covers the past too; its last T are these tokens. None: nothing is padding.
    """
    config, (_, T) = model.config, tokens_BT.shape
    reach = reach_of(config)
    past = 0 if cache is None else cache.get_seq_length()
    kept = past if reach is None else min(past, reach)
    starts_with_zeros = config.remembers and config.initial_memory == "zeros"
    before = reach if starts_with_zeros and reach is not None else kept
    mask = Mask(memory=before, segment=T, valid_B=None, visible_distance=reach, device=tokens_BT.device)
    mask_BTS = mask.cells_BTS
    unreal_BT = None if real_BP is None else ~real_BP[:, -T:]
    if real_BP is not None and not starts_with_zeros:
        mask_BTS = mask_BTS | ~real_BP[:, None, real_BP.shape[1] - before - T :]
        # Padding sees itself, or its row would have nothing to share its attention between; nobody else sees it.
        mask_BTS[:, torch.arange(T), before + torch.arange(T)] = False
    distances = [layer.nearest(before + T) for layer in distances]

    def attend_here(layer: Layer, query_BTX: Tensor, _: Tensor | None, key_value_BTX: Tensor) -> Tensor:
        start = [kept_HK[:, None] for kept_HK in layer.start()] if starts_with_zeros else []
        (query_BHTK,), new = heads(layer, query_BTX), list(heads(layer, key_value_BTX))
        if start and unreal_BT is not None:
            new = [torch.where(unreal_BT[:, None, :, None], *pair) for pair in zip(start, new, strict=True)]
        known = new if cache is None else list(cache.update(*new, layer.number))
        known = [part_BHSK[:, :, part_BHSK.shape[2] - kept - T :] for part_BHSK in known]
        if start and before > kept:
            known = [
                torch.cat([start_H1K.expand(len(part_BHSK), -1, before - kept, -1), part_BHSK], dim=2)
                for start_H1K, part_BHSK in zip(start, known, strict=True)
            ]
        seen: dict[str, Any] = {"distances": distances[layer.number], "mask_BTS": mask_BTS}
        dropout = partial(layer.attention_dropout, time_axis=2)
        mixed_BHTK = (model.attend or attend)(query_BHTK, *known, **seen, dropout=dropout)
        mixed_BTX = mixed_BHTK.transpose(1, 2).reshape(query_BTX.shape)
        if layer.neighbours_WX is None:
            return mixed_BTX
        value_BHSK = known[1]
        if real_BP is not None and not starts_with_zeros:
            value_BHSK = value_BHSK.masked_fill(~real_BP[:, None, real_BP.shape[1] - before - T :, None], 0.0)
        return mixed_BTX + from_neighbours(layer, value_BHSK.transpose(1, 2).flatten(2), segment=T, reach=reach)

    return model.through_layers(
        model.enter(tokens_BT, recent_BP=recent_BP, real_BT=None if real_BP is None else real_BP[:, -T:]), attend_here
    )
