"""How the model knows the order of tokens: the one place that turns the word `encoding` into a class.

Two ways are open to an encoding: it may change a layer's input (`enter`), and it may tell attention how each distance changes the scores
(`distances`). The paper's own, and Shaw's, use the second; the absolute ones the first, which is why they cannot have memory.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError
from transformer_xl.model.dropout import dropout_at


@dataclass(frozen=True, kw_only=True)
class Distances:
    """What one layer's attention is told about order; column s of S is distance S-1-s. None: that term does not exist.

    score of key j for query i, at distance r = i - j
      (a) query_i . key_j             (b) query_i . relative_key_r
      (c) content_bias . key_j        (d) position_bias . relative_key_r, or distance_bias_r
    """

    content_bias_HK: Tensor | None = None
    position_bias_HK: Tensor | None = None
    relative_key_HSK: Tensor | None = None
    distance_bias_HS: Tensor | None = None

    def nearest(self, length: int) -> "Distances":
        """The `length` nearest distances of a longer table."""
        key_HSK, bias_HS = self.relative_key_HSK, self.distance_bias_HS
        return replace(
            self,
            relative_key_HSK=None if key_HSK is None else key_HSK[:, key_HSK.shape[1] - length :],
            distance_bias_HS=None if bias_HS is None else bias_HS[:, bias_HS.shape[1] - length :],
        )


def frequencies(width: int, *, rounded: str = "float32", device: torch.device | None = None) -> Tensor:
    """[width/2], float32 even in a float64 model, as in every published checkpoint; `rounded` is a configuration's `frequencies`."""
    exponents_E = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies_E = 1.0 / (10000.0**exponents_E)
    return frequencies_E.half().float() if rounded == "float16" else frequencies_E


def sinusoid(distances_S: Tensor, *, width: int, dtype: torch.dtype, rounded: str = "float32") -> Tensor:
    """R: the sines of all frequencies, then the cosines. Never in half precision: there, thousands of distances fall together."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies_E = frequencies(width, rounded=rounded, device=distances_S.device)
    angles_SE = distances_S.to(exact)[:, None] * frequencies_E.to(exact)
    return torch.cat([angles_SE.sin(), angles_SE.cos()], dim=-1)


def falling(length: int, *, device: torch.device) -> Tensor:
    """length-1, ..., 1, 0: distances of the keys seen by the last query."""
    return torch.arange(length - 1, -1, -1, device=device)


class Encoding(nn.Module):
    """No order at all; the base of the others."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def initialise(self) -> None:
        """Draws this encoding's own weights; those of linear layers are drawn by the model."""

    @property
    def farthest(self) -> int | None:
        """Distances beyond this one look like it; None where each looks different."""
        return None

    def enter_first(self, hidden_BTD: Tensor) -> Tensor:
        """Before the first layer and before dropout."""
        return hidden_BTD

    def enter(self, hidden_BTD: Tensor, *, layer: int) -> Tensor:
        """Before each layer."""
        return hidden_BTD

    def distances(self, length: int) -> list[Distances]:
        """For each layer, given the number of keys S."""
        return [Distances()] * self.config.n_layer


class RelativeEncoding(Encoding):
    """The paper's: a sinusoid of the distance, its own key projection W_kR, and u and v in place of the query's position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        pairs = 1 if config.share_biases else config.n_layer
        self.content_bias_PHK = nn.Parameter(torch.empty(pairs, config.n_head, config.d_head))
        self.position_bias_PHK = nn.Parameter(torch.empty(pairs, config.n_head, config.d_head))
        self.relative_key = nn.ModuleList(
            nn.Linear(config.d_model, config.n_head * config.d_head, bias=False) for _ in range(config.n_layer)
        )
        self.dropout = dropout_at(config, "position")

    def initialise(self) -> None:
        nn.init.normal_(self.content_bias_PHK, 0.0, self.config.init_std)
        nn.init.normal_(self.position_bias_PHK, 0.0, self.config.init_std)

    @property
    def farthest(self) -> int | None:
        return self.config.clamp_len or None

    def distances(self, length: int) -> list[Distances]:
        weight = self.content_bias_PHK
        distance_S = falling(length, device=weight.device)
        if self.farthest is not None:
            distance_S = distance_S.clamp(max=self.farthest)
        # Autocast is off in here: a bf16 product would blur neighbouring distances. It is small, having no lanes in it.
        with torch.autocast(weight.device.type, enabled=False):
            position_SD = sinusoid(
                distance_S, width=self.config.d_model, dtype=weight.dtype, rounded=self.config.frequencies
            )
            position_SD = self.dropout(position_SD, time_axis=0)
            return [self._layer(layer, position_SD) for layer in range(self.config.n_layer)]

    def _layer(self, layer: int, position_SD: Tensor) -> Distances:
        weight: Tensor = self.relative_key[layer].weight  # type: ignore[assignment]
        S, H, K = position_SD.shape[0], self.config.n_head, self.config.d_head
        key_SHK = F.linear(position_SD, weight.to(position_SD.dtype)).to(weight.dtype).view(S, H, K)
        pair = 0 if self.config.share_biases else layer
        return Distances(
            content_bias_HK=self.content_bias_PHK[pair],
            position_bias_HK=self.position_bias_PHK[pair],
            relative_key_HSK=key_SHK.transpose(0, 1),
        )


class ShawEncoding(Encoding):
    """Shaw et al.: a learned key for each distance and layer, terms (a) and (b). `biased` adds (c) and (d) as the authors' code does.

    Row r is distance r; keys farther away than the table reuse its last row.
    """

    def __init__(self, config: ModelConfig, *, biased: bool) -> None:
        super().__init__(config)
        N, R, H, K = config.n_layer, config.learned_positions, config.n_head, config.d_head
        self.distance_key_NRHK = nn.Parameter(torch.empty(N, R, H, K))
        self.content_bias_NHK = nn.Parameter(torch.empty(N, H, K)) if biased else None
        self.distance_bias_NRH = nn.Parameter(torch.empty(N, R, H)) if biased else None

    def initialise(self) -> None:
        nn.init.normal_(self.distance_key_NRHK, 0.0, self.config.init_std)
        if self.content_bias_NHK is not None and self.distance_bias_NRH is not None:
            nn.init.normal_(self.content_bias_NHK, 0.0, self.config.init_std)
            nn.init.zeros_(self.distance_bias_NRH)

    @property
    def farthest(self) -> int:
        return (self.config.clamp_len or self.config.learned_positions) - 1

    def distances(self, length: int) -> list[Distances]:
        row_S = falling(length, device=self.distance_key_NRHK.device).clamp(max=self.farthest)
        return [
            Distances(
                relative_key_HSK=self.distance_key_NRHK[layer][row_S].transpose(0, 1),
                content_bias_HK=None if self.content_bias_NHK is None else self.content_bias_NHK[layer],
                distance_bias_HS=None
                if self.distance_bias_NRH is None
                else self.distance_bias_NRH[layer][row_S].transpose(0, 1),
            )
            for layer in range(self.config.n_layer)
        ]


class AbsoluteEncoding(Encoding):
    """Vaswani et al.: a sinusoid added to the embeddings. Positions count down to 0 at the segment's end, as in the authors' comparison."""

    def enter_first(self, hidden_BTD: Tensor) -> Tensor:
        position_T = falling(hidden_BTD.shape[1], device=hidden_BTD.device)
        if self.config.clamp_len:
            position_T = position_T.clamp(max=self.config.clamp_len)
        position_TD = sinusoid(
            position_T, width=self.config.d_model, dtype=hidden_BTD.dtype, rounded=self.config.frequencies
        )
        return hidden_BTD + position_TD.to(hidden_BTD.dtype)


class PerLayerEncoding(Encoding):
    """Al-Rfou et al.: a learned position added to the input of every layer. Row r is r positions before the segment's end."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.position_NRD = nn.Parameter(torch.empty(config.n_layer, config.learned_positions, config.d_model))

    def initialise(self) -> None:
        nn.init.normal_(self.position_NRD, 0.0, self.config.init_std)

    def enter(self, hidden_BTD: Tensor, *, layer: int) -> Tensor:
        T, learned = hidden_BTD.shape[1], self.config.learned_positions
        if T > learned:
            raise InputError(
                f"a segment of {T} tokens is longer than the {learned} positions this model has learned; cut it shorter"
            )
        return hidden_BTD + self.position_NRD[layer, :T].flip(0)


def build_encoding(config: ModelConfig) -> Encoding:
    match config.encoding:
        case "relative":
            return RelativeEncoding(config)
        case "shaw":
            return ShawEncoding(config, biased=False)
        case "shaw_biased":
            return ShawEncoding(config, biased=True)
        case "absolute":
            return AbsoluteEncoding(config)
        case "per_layer":
            return PerLayerEncoding(config)
