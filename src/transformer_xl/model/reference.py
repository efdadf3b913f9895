"""The paper's attention, slow: Section 3.3's terms (a) to (d), each written down as it stands there, for every pair of query and key.

The oracle of the tests and the source of the term analysis. Nothing here is clever, on purpose.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.model.attention import AttentionDropout
from transformer_xl.model.encodings import Distances


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The four parts of every score, before scaling and masking, [B, H, T, S] each."""

    content: Tensor  # (a) what the query looks for, in what the key holds
    content_distance: Tensor  # (b) what the query looks for, in how far away the key is
    content_bias: Tensor  # (c) what the key holds, whoever asks
    distance_bias: Tensor  # (d) how far away the key is, whoever asks

    def sum(self) -> Tensor:
        return self.content + self.content_distance + self.content_bias + self.distance_bias


def attention_terms(query_BHTK: Tensor, key_BHSK: Tensor, *, distances: Distances) -> Terms:
    B, H, T = query_BHTK.shape[:3]
    S = key_BHSK.shape[2]
    # Key j of S stands at distance i - j from query i, where query i is key S-T+i. Column S-1-r of the tables is distance r.
    row_TS = torch.tensor([[max(0, (S - T + i) - j) for j in range(S)] for i in range(T)], device=query_BHTK.device)
    column_TS = S - 1 - row_TS

    a_BHTS = torch.einsum("bhtk,bhsk->bhts", query_BHTK, key_BHSK)
    b_BHTS = c_BHTS = d_BHTS = torch.zeros_like(a_BHTS)
    if distances.relative_key_HSK is not None:
        relative_key_HTSK = distances.relative_key_HSK[:, column_TS]  # W_kR R_{i-j} for each pair
        b_BHTS = torch.einsum("bhtk,htsk->bhts", query_BHTK, relative_key_HTSK)
        if distances.position_bias_HK is not None:
            d_HTS = torch.einsum("hk,htsk->hts", distances.position_bias_HK, relative_key_HTSK)
            d_BHTS = d_HTS.expand(B, H, T, S)
    if distances.content_bias_HK is not None:
        c_BHS = torch.einsum("hk,bhsk->bhs", distances.content_bias_HK, key_BHSK)
        c_BHTS = c_BHS[:, :, None].expand(B, H, T, S)
    if distances.distance_bias_HS is not None:
        d_BHTS = distances.distance_bias_HS[:, column_TS].expand(B, H, T, S)
    return Terms(content=a_BHTS, content_distance=b_BHTS, content_bias=c_BHTS, distance_bias=d_BHTS)


def attention_probabilities(score_BHTS: Tensor, *, width: int, mask_BTS: Tensor) -> Tensor:
    """Scaled, masked, softmax over the keys."""
    scaled_BHTS = score_BHTS / width**0.5
    return torch.softmax(scaled_BHTS.masked_fill(mask_BTS[:, None], float("-inf")), dim=-1)


def reference_attend(
    query_BHTK: Tensor,
    key_BHSK: Tensor,
    value_BHSK: Tensor,
    *,
    distances: Distances,
    mask_BTS: Tensor,
    dropout: AttentionDropout,
) -> Tensor:
    """The same answer as `attention.attend`, by the long way."""
    terms = attention_terms(query_BHTK, key_BHSK, distances=distances)
    probability_BHTS = attention_probabilities(terms.sum(), width=query_BHTK.shape[-1], mask_BTS=mask_BTS)
    return torch.einsum("bhts,bhsk->bhtk", dropout(probability_BHTS), value_BHSK)
