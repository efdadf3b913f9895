"""A model that tells what every layer looks at while it answers as it always does.

Scores are laid out by distance instead of by key, which makes each query's keys one row of R columns with nothing to mask:

key       m m m | 0 1 2          columns are distances R-1 .. 0, here R = 3
query 0     2 1 | 0              (a) and (c) are read from the products with all keys through a view whose rows
query 1       2 | 1 0            start one key further right each: the relative shift, the other way round
query 2         | 2 1 0          (b) and (d) come by distance and need no shift
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from transformer_xl.model import TransformerXL
from transformer_xl.model.attention import AttentionDropout
from transformer_xl.model.encodings import Distances

TERMS = {
    "a": "what the query looks for, in what the key holds",
    "b": "what the query looks for, in how far away the key is",
    "c": "what the key holds, whoever asks",
    "d": "how far away the key is, whoever asks",
}
TOTAL = "total"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One layer's attention in one segment, by distance: the columns are distances R-1 .. 0."""

    terms: dict[str, Tensor]
    """Each term's scaled scores, [B, H, T, R], or [1, H, 1, R] where every query has the same. Terms that the encoding lacks are absent."""
    unseen_BTR: Tensor | None
    """True where a query has no key at that distance; None where each has one at every distance."""

    def probability(self, term: str, *, first: int = 0) -> Tensor:
        """Softmax of one term alone, or of their sum (`TOTAL`), for the queries from `first` on."""
        T = self.terms["a"].shape[2]
        rows = slice(first - T, None)  # counted from the end: a term with one row for all queries keeps it
        parts = list(self.terms.values()) if term == TOTAL else [self.terms[term]]
        score_BHTR = sum((part[:, :, rows] for part in parts[1:]), parts[0][:, :, rows])
        if self.unseen_BTR is not None and bool(self.unseen_BTR[:, rows].any()):
            score_BHTR = score_BHTR.masked_fill(self.unseen_BTR[:, None, rows], -math.inf)
        return torch.softmax(score_BHTR, dim=-1)


Record = Callable[[int, Scores, Tensor], None]
"""Told the layer, its scores, and the probabilities [B, H, T, R] of their sum."""


@contextmanager
def recording(model: TransformerXL, *, span: int, record: Record) -> Iterator[None]:
    """The model tells `record` what every layer looks at, and answers as it always does; afterwards its attention is what it was.

    For queries that see at most `span` keys.
    """
    calls = count()

    def attend(
        query_BHTK: Tensor,
        key_BHSK: Tensor,
        value_BHSK: Tensor,
        *,
        distances: Distances,
        mask_BTS: Tensor,
        dropout: AttentionDropout,
    ) -> Tensor:
        scores = scores_by_distance(query_BHTK, key_BHSK, distances=distances, mask_BTS=mask_BTS, span=span)
        probability_BHTR = scores.probability(TOTAL)
        record(next(calls) % model.config.n_layer, scores, probability_BHTR)
        B, H, T, R = probability_BHTR.shape
        by_key_BHTW = probability_BHTR.new_zeros(B, H, T, R - 1 + T)
        by_distance(by_key_BHTW, span=span).copy_(probability_BHTR)
        return dropout(by_key_BHTW).to(value_BHSK.dtype) @ _newest(value_BHSK, R - 1 + T, axis=2)

    usual, model.attend = model.attend, attend
    try:
        yield
    finally:
        model.attend = usual


def scores_by_distance(
    query_BHTK: Tensor, key_BHSK: Tensor, *, distances: Distances, mask_BTS: Tensor, span: int
) -> Scores:
    """The terms of Section 3.3, each alone and scaled as their sum is; `reference.attention_terms` gives the same by key, unscaled."""
    T, scale = query_BHTK.shape[2], query_BHTK.shape[3] ** -0.5
    W = span - 1 + T  # keys that some query sees: its own and span-1 before it
    query_BHTK = query_BHTK * scale
    key_BHWK = _newest(key_BHSK, W, axis=2)
    terms = {"a": by_distance(query_BHTK @ key_BHWK.transpose(-1, -2), span=span)}
    if distances.relative_key_HSK is not None:
        relative_key_HRK = _newest(distances.relative_key_HSK, span, axis=1)
        terms["b"] = query_BHTK @ relative_key_HRK.transpose(-1, -2)
    if distances.content_bias_HK is not None:
        c_BHW = torch.einsum("hk,bhwk->bhw", distances.content_bias_HK * scale, key_BHWK)
        terms["c"] = c_BHW.unfold(-1, span, 1)
    if distances.relative_key_HSK is not None and distances.position_bias_HK is not None:
        d_HR = torch.einsum("hk,hrk->hr", distances.position_bias_HK * scale, relative_key_HRK)
        terms["d"] = d_HR[None, :, None]
    if distances.distance_bias_HS is not None:
        terms["d"] = _newest(distances.distance_bias_HS * scale, span, axis=1)[None, :, None]
    unseen_BTR = by_distance(_newest(mask_BTS, W, axis=2, missing=True)[:, None], span=span)[:, 0]
    return Scores(terms=terms, unseen_BTR=unseen_BTR if bool(unseen_BTR.any()) else None)


def by_distance(by_key_BHTW: Tensor, *, span: int) -> Tensor:
    """A view [B, H, T, R] of what stands by key, W = R-1+T: row t holds the R keys that end at query t's own."""
    B, H, T, W = by_key_BHTW.shape
    by_key_BHTW = by_key_BHTW.contiguous()
    return by_key_BHTW.as_strided((B, H, T, span), (H * T * W, T * W, W + 1, 1), by_key_BHTW.storage_offset())


def _newest(values: Tensor, length: int, *, axis: int, missing: float = 0) -> Tensor:
    """The last `length` along an axis, with `missing` in front where there are fewer."""
    have = values.shape[axis]
    if have >= length:
        return values.narrow(axis, have - length, length)
    shape = list(values.shape)
    shape[axis] = length - have
    return torch.cat([values.new_full(shape, missing), values], dim=axis)
