"""Runs of tokens as tokens of their own: the last two, three, four, ... are looked up together, each order in a table that its runs share by a hash.

tokens      t h e _ c a t         order 2 of `t`: a t       order 3: c a t       rows: hash(run) mod R, so that nothing grows with the vocabulary
                        ^         a token before the first is one that does not exist, and has a row like any other

A network learns what follows `the` from what it can compute of three tokens; here it has a row of its own from the first step on. Costs a look-up.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from transformer_xl.config import ModelConfig
from transformer_xl.model.products import Linear

NO_TOKEN = -1
SPREAD, FIRST, SECOND, BITS = 1_000_003, 0x2C1B3C6D, 0x297A2D39, 0x7FFFFFFF
"""Of the hash; `native/inference.cpp` has the same."""


class NgramEmbedding(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.sparse_gradient = False
        """The tables' gradient has only the rows that were read: of millions a step reads thousands. For an optimiser that takes it so."""
        self.tables_GRE = nn.Parameter(torch.empty(len(config.ngrams), config.ngram_rows, config.d_ngram))
        self.projection = Linear(len(config.ngrams) * config.d_ngram, config.d_model, bias=False)

    def initialise(self) -> None:
        """Runs say nothing at first; the projection lets a row of any width be heard."""
        nn.init.zeros_(self.tables_GRE)
        nn.init.normal_(self.projection.weight, 0.0, self.config.d_ngram**-0.5)

    def forward(self, tokens_BT: Tensor, recent_BP: Tensor | None) -> Tensor:
        """[B, T, D], to be added to the tokens' own. `recent_BP`: the tokens before them, NO_TOKEN where there are none; None: none at all."""
        rows = rows_of(tokens_BT, recent_BP, orders=self.config.ngrams, rows=self.config.ngram_rows)
        if self.sparse_gradient:
            found_BTX: Tensor = _Rows.apply(self.tables_GRE, torch.stack(rows, dim=-1))  # type: ignore[no-untyped-call]
        else:
            found = [F.embedding(row_BT, table_RE) for row_BT, table_RE in zip(rows, self.tables_GRE, strict=True)]
            found_BTX = torch.cat(found, dim=-1)
        result: Tensor = self.projection(found_BTX)
        return result * self.config.embedding_scale


class _Rows(torch.autograd.Function):
    """Rows of all tables side by side, [B, T, G*E], with a gradient that is sparse: each row that was read once, and coalesced."""

    @staticmethod
    def forward(ctx: Any, tables_GRE: Tensor, row_BTG: Tensor) -> Tensor:
        G, R, E = tables_GRE.shape
        at_BTG = row_BTG + torch.arange(G, device=row_BTG.device) * R
        ctx.save_for_backward(at_BTG)
        ctx.shape = tables_GRE.shape
        return tables_GRE.view(G * R, E).index_select(0, at_BTG.flatten()).view(*row_BTG.shape[:2], G * E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTX: Tensor) -> tuple[Tensor, None]:
        (at_BTG,), (_, R, E) = ctx.saved_tensors, ctx.shape
        read_P, place = torch.unique(at_BTG.flatten(), return_inverse=True)
        gradient_PE = gradient_BTX.new_zeros(len(read_P), E).index_add_(0, place, gradient_BTX.reshape(-1, E))
        indices_2P = torch.stack([read_P // R, read_P % R])
        return torch.sparse_coo_tensor(
            indices_2P, gradient_PE, ctx.shape, is_coalesced=True, check_invariants=False
        ), None


def rows_of(tokens_BT: Tensor, recent_BP: Tensor | None, *, orders: Sequence[int], rows: int) -> list[Tensor]:
    """For each order the row of the run that ends at each token, [B, T]."""
    T, P = tokens_BT.shape[1], max(orders) - 1
    if recent_BP is None:
        recent_BP = tokens_BT.new_full((tokens_BT.shape[0], P), NO_TOKEN)
    all_BS = torch.cat([recent_BP.to(tokens_BT.dtype), tokens_BT], dim=1).long()
    found, hash_BT = [], torch.zeros_like(tokens_BT, dtype=torch.int64)
    for back in range(max(orders)):
        hash_BT = (hash_BT * SPREAD + all_BS[:, P - back : P - back + T] + 1) & BITS
        if back + 1 in orders:
            mixed_BT = ((hash_BT ^ (hash_BT >> 15)) * FIRST) & BITS
            mixed_BT = ((mixed_BT ^ (mixed_BT >> 12)) * SECOND) & BITS
            found.append((mixed_BT ^ (mixed_BT >> 15)) % rows)
    return found
