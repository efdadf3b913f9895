"""A segment through the layers, with the past in one of transformers' caches: keys and values as they were projected, never hidden states.

    columns     z z z | k k k k | 0 1 2 3      z: what a stream starts with, where that is zeros (`initial_memory`)
    lane 0      z z z | a b c d | e f g h      k: what the cache keeps, at most as many as a token looks back
    lane 1      z z z | . . i j | k l m n      .: padding, hidden; or, where streams start with zeros, made to be those zeros

A token sees itself and as many before it as its model remembers, however the text is cut into calls; so calls of any lengths, and none but one, give the
same numbers as `inference.Engine`.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from transformer_xl.huggingface.configuration import reach_of
from transformer_xl.model import TransformerXL
from transformer_xl.model.attention import hidden_keys
from transformer_xl.model.encodings import Distances
from transformer_xl.model.transformer import Layer


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
) -> Tensor:
    """The last layer's output, [B, T, D]; `cache` has read the tokens afterwards.

    `real_BP` is False at padding and covers the past too; its last T are these tokens. None: nothing is padding.
    """
    config, (_, T) = model.config, tokens_BT.shape
    reach = reach_of(config)
    past = 0 if cache is None else cache.get_seq_length()
    kept = past if reach is None else min(past, reach)
    starts_with_zeros = config.remembers and config.initial_memory == "zeros"
    before = reach if starts_with_zeros and reach is not None else kept
    hidden_BTS = hidden_keys(memory=before, segment=T, valid_B=None, visible_distance=reach, device=tokens_BT.device)
    unreal_BT = None if real_BP is None else ~real_BP[:, -T:]
    if real_BP is not None and not starts_with_zeros:
        hidden_BTS = hidden_BTS | ~real_BP[:, None, real_BP.shape[1] - before - T :]
        # Padding sees itself, or its row would have nothing to share its attention between; nobody else sees it.
        hidden_BTS[:, torch.arange(T), before + torch.arange(T)] = False
    distances = [layer.nearest(before + T) for layer in distances]
    nothing_B0D = model.vocabulary.bias_V.new_zeros(tokens_BT.shape[0], 0, config.d_model)

    def attend_in(number: int, layer: Layer) -> Callable[..., Tensor]:
        start_2H1K = _start(layer) if starts_with_zeros else None

        def attend(query_BHTK: Tensor, key_BHTK: Tensor, value_BHTK: Tensor, **how: Any) -> Tensor:
            new = [key_BHTK, value_BHTK]
            if start_2H1K is not None and unreal_BT is not None:
                new = [torch.where(unreal_BT[:, None, :, None], *pair) for pair in zip(start_2H1K, new, strict=True)]
            known = list(new) if cache is None else list(cache.update(*new, number))
            known = [part_BHSK[:, :, part_BHSK.shape[2] - kept - T :] for part_BHSK in known]
            if start_2H1K is not None and before > kept:
                known = [
                    torch.cat([start_H1K.expand(len(part_BHSK), -1, before - kept, -1), part_BHSK], dim=2)
                    for start_H1K, part_BHSK in zip(start_2H1K, known, strict=True)
                ]
            return model.attend(query_BHTK, *known, **how)

        return attend

    hidden_BTD = model.encoding.enter_first(model.vocabulary.embed(tokens_BT))
    hidden_BTD = model.embedding_dropout(hidden_BTD, 1)
    for number, layer in enumerate(cast(list[Layer], list(model.layers))):
        entered_BTD = model.encoding.enter(hidden_BTD, layer=number)
        hidden_BTD = layer(entered_BTD, nothing_B0D, distances[number], hidden_BTS, attend_in(number, layer))
    if model.final_norm is not None:
        hidden_BTD = model.final_norm(hidden_BTD)
    hidden_BTD = model.output_dropout(hidden_BTD, 1)
    return cast(Tensor, hidden_BTD)


def _start(layer: Layer) -> tuple[Tensor, Tensor]:
    """Key and value of a zero vector, [H, 1, K]: before the first token there are as many as the model remembers."""
    config = layer.config
    zero_D = layer.query.weight.new_zeros(config.d_model)
    prepared_D = layer.attention_norm(zero_D) if config.norm == "pre" else zero_D
    key_H1K, value_H1K = layer.key_value(prepared_D).view(2, config.n_head, 1, config.d_head)
    return key_H1K, value_H1K
