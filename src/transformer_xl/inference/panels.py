"""What distances mean, laid out for the kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl import native
from transformer_xl.model import TransformerXL


@dataclass(frozen=True)
class Panels:
    """Projected relative keys as the kernels read them, [H, panel, K, P]: panel p holds the distances pP + P-1 down to pP."""

    distances: int
    """How many are told apart; farther ones look like the last."""
    layers: list[dict[str, Tensor | None]]
    """u, v, relative keys and biases by distance (scaled) of each layer; None where the encoding has none."""

    @classmethod
    def of(cls, model: TransformerXL, distances: int) -> "Panels":
        P = native.panel_width(model.vocabulary.bias_V.dtype)
        count = -(-distances // P)
        row_R = torch.arange(count * P).clamp(max=distances - 1).view(count, P).flip(1)
        layers: list[dict[str, Tensor | None]] = []
        for layer in model.encoding.distances(distances):
            key_HSK, bias_HS = layer.relative_key_HSK, layer.distance_bias_HS
            falling_R = distances - 1 - row_R  # the columns that `Distances` keeps them in
            panels_HRKP = None if key_HSK is None else key_HSK[:, falling_R].transpose(2, 3).contiguous()
            bias_HRP = None if bias_HS is None else (bias_HS * model.config.d_head**-0.5)[:, falling_R].contiguous()
            biases = {"content_bias": layer.content_bias_HK, "position_bias": layer.position_bias_HK}
            layers.append({**biases, "relative": panels_HRKP, "distance_bias": bias_HRP})
        return cls(distances, layers)
