"""Tokens -> embeddings, and hidden states -> losses and log-probabilities: adaptive input and adaptive softmax, one owner for what they share.

    id       0 ........ cutoff 1 ........ cutoff 2 ....... V
    cluster  0 (head)          1 (tail)          2 (tail)         width of cluster i: d_embed / div_val^i
    head     its own words, then one logit for each tail          log p(word in tail i) = head[tail i] + tail_i[word]

A plain softmax is the case of no cutoffs: a head and no tails.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer_xl.config import NOT_A_TARGET, VocabularyConfig
from transformer_xl.model import products
from transformer_xl.model.dropout import word_dropout
from transformer_xl.model.softmax import FEWEST, softmax_loss
from transformer_xl.model.table_gradient import TableGradient, adaptive_loss, embed_rows

MANY_WORDS = 20_000
"""From so many on, a tied table gets its gradient in one piece: each further one of its size costs more than the products themselves."""
FEW_POSITIONS = 256
"""Up to so many tokens of a pass, products are so small that this is so from `FEWEST` words on."""
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""As F.linear; an engine gives its own, which reads the same matrices faster."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where in a segment, flattened, the members of each cluster stand. How many there are is the size of a tensor, which a device would have to be asked;
    whoever has the tokens on the host finds it there, and hands it in."""

    tokens: tuple[Tensor, ...] | None = None
    """One [P] for each cluster, where clusters have tables of their own."""
    targets: tuple[Tensor, ...] | None = None
    """One [P] for each tail."""


class Vocabulary(nn.Module):
    def __init__(self, config: VocabularyConfig) -> None:
        super().__init__()
        self.config = config
        self.every_tail = False
        """Open a tail even where no target is in it, so that all its weights have a gradient, of 0: exchanged gradients must be the same set."""
        self.spare_gradient: Tensor | None = None
        self._in_one_piece = False
        """Whether the last pass that learned gave the table its gradient in one piece."""
        self.one_table = config.div_val == 1  # clusters of one width share a table, and the input's projection
        self.tables = nn.ParameterList(self._tables())
        self.output_tables = nn.ParameterList([] if config.tie_embeddings else self._tables())
        projected = [cluster for cluster in range(config.clusters) if config.has_projection(cluster)]
        self.input_projections = self._projections(projected[:1] if self.one_table else projected)
        self.output_projections = self._projections(
            [cluster for cluster in projected if not config.ties_projection(cluster)]
        )
        self.bias_V = nn.Parameter(torch.empty(config.vocabulary))
        tails = config.clusters - 1
        self.tail_weight_CE = nn.Parameter(torch.empty(tails, config.embedding_width)) if tails else None
        self.tail_bias_C = nn.Parameter(torch.empty(tails)) if tails else None

    def _tables(self) -> list[Tensor]:
        config, edges = self.config, self.config.cluster_edges
        if self.one_table:
            return [torch.empty(config.vocabulary, config.embedding_width)]
        return [torch.empty(edges[i + 1] - edges[i], config.cluster_width(i)) for i in range(config.clusters)]

    def _projections(self, clusters: list[int]) -> nn.ParameterDict:
        """By cluster: [D, E], D the model's width and E the cluster's."""
        return nn.ParameterDict(
            {str(i): torch.empty(self.config.d_model, self.config.cluster_width(i)) for i in clusters}
        )

    def initialise(self) -> None:
        config = self.config
        for table in (*self.tables, *self.output_tables):
            nn.init.normal_(table, 0.0, config.init_std)
        for projection in (*self.input_projections.values(), *self.output_projections.values()):
            nn.init.normal_(projection, 0.0, config.projection_init_std)
        nn.init.zeros_(self.bias_V)
        if self.tail_weight_CE is not None and self.tail_bias_C is not None:
            nn.init.normal_(self.tail_weight_CE, 0.0, config.init_std)
            nn.init.zeros_(self.tail_bias_C)

    # --- in

    def table_gradient(self, tokens_BT: Tensor) -> TableGradient | None:
        """For a pass that embeds and scores: hand it to both. None where the table is small, not shared, or not learning."""
        config = self.config
        shared = self.one_table and config.tie_embeddings and not config.has_projection(0)
        learns = torch.is_grad_enabled() and self.tables[0].requires_grad
        if not (shared and learns):
            return None
        enough = MANY_WORDS if tokens_BT.numel() > FEW_POSITIONS else min(MANY_WORDS, FEWEST)
        self._in_one_piece = config.vocabulary >= enough
        if not self._in_one_piece:
            return None
        spare_VE, self.spare_gradient = self.spare_gradient, None
        return TableGradient(spare_VE)

    def give_back_gradient(self) -> None:
        """Before gradients are dropped: the large one's memory will be used again. Only for those who keep no gradient of an earlier pass."""
        if self._in_one_piece:
            self.spare_gradient, self.tables[0].grad = self.tables[0].grad, None

    def places(self, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What `Places` holds, by tokens and targets that are on the host."""
        edges = self.config.cluster_edges

        def found(numbers_BT: np.ndarray, edges: tuple[int, ...]) -> list[np.ndarray]:
            flat_P = numbers_BT.reshape(-1)
            return [np.flatnonzero((flat_P >= low) & (flat_P < high)) for low, high in pairwise(edges)]

        return [] if self.one_table else found(tokens_BT, edges), found(targets_BT, edges[1:])

    def _found_places(self, flat_P: Tensor, edges: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The same where nobody knows: a device is waited for, once for each cluster."""
        return tuple(((flat_P >= low) & (flat_P < high)).nonzero().squeeze(1) for low, high in pairwise(edges))

    def embed(
        self,
        tokens_BT: Tensor,
        *,
        linear: Linear = products.linear,
        gradient: TableGradient | None = None,
        places: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """[B, T, D], scaled as the kind of model has it; the output side uses the same tables unscaled."""
        config = self.config
        if gradient is not None:
            embedded_BTD = embed_rows(tokens_BT, table_VE=self.tables[0], gradient=gradient)
        elif self.one_table:
            embedded_BTD = self._project_in(0, F.embedding(tokens_BT, self.tables[0]), linear)
        else:
            embedded_BTD = self._embed_clusters(tokens_BT, linear, places)
        if config.embedding_scale != 1:
            embedded_BTD = embedded_BTD * config.embedding_scale
        if self.training and config.word_dropout:
            factor_BT1 = word_dropout(
                tokens_BT, rate=config.word_dropout, vocabulary=config.vocabulary, like=embedded_BTD
            )
            embedded_BTD = embedded_BTD * factor_BT1
        return embedded_BTD

    def _embed_clusters(self, tokens_BT: Tensor, linear: Linear, places: tuple[Tensor, ...] | None = None) -> Tensor:
        edges, flat_P = self.config.cluster_edges, tokens_BT.reshape(-1)
        if torch.compiler.is_exporting():
            # How many tokens a cluster has is no size that a graph could know: look every token up in each.
            embedded_BTD = tokens_BT.new_zeros(1, dtype=self.tables[0].dtype)
            for cluster, table in enumerate(self.tables):
                row_BT = (tokens_BT - edges[cluster]).clamp(0, len(table) - 1)
                inside_BT1 = ((tokens_BT >= edges[cluster]) & (tokens_BT < edges[cluster + 1]))[..., None]
                rows_BTD = self._project_in(cluster, F.embedding(row_BT, table), linear)
                embedded_BTD = torch.where(inside_BT1, rows_BTD, embedded_BTD)
            return embedded_BTD
        places = self._found_places(flat_P, edges) if places is None else places
        rows = [
            self._project_in(cluster, F.embedding(flat_P[place_P] - edges[cluster], table), linear)
            for cluster, (table, place_P) in enumerate(zip(self.tables, places, strict=True))
        ]
        # The clusters' rows one after another, put back into token order by the inverse of how they were gathered.
        order_P = torch.cat(places).argsort()
        return torch.cat(rows)[order_P].view(*tokens_BT.shape, self.config.d_model)

    def _project_in(self, cluster: int, embedded: Tensor, linear: Linear) -> Tensor:
        if not self.config.has_projection(cluster):
            return embedded
        return linear(embedded, self.input_projections[str(cluster)], None)

    # --- out

    def loss(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor,
        *,
        linear: Linear = products.linear,
        gradient: TableGradient | None = None,
        places: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """[B, T] in nats, in token order. A tail is computed for its own targets only: `places`, where the host knows them."""
        config, edges = self.config, self.config.cluster_edges
        hidden_PD, target_P = hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), targets_BT.reshape(-1)
        places = self._found_places(target_P, edges[1:]) if places is None else places
        if gradient is not None:
            tails = {"places": places, "tail_weight_CE": self.tail_weight_CE, "tail_bias_C": self.tail_bias_C}
            shared = {"table_VE": self.tables[0], "bias_V": self.bias_V, "gradient": gradient}
            return adaptive_loss(hidden_PD, target_P, edges=edges, **shared, **tails).view(targets_BT.shape)  # type: ignore[arg-type]
        if self._scores_in_pieces(hidden_PD):
            table_VE = (self.tables if config.tie_embeddings else self.output_tables)[0]
            return softmax_loss(hidden_PD, target_P, table_VE=table_VE, bias_V=self.bias_V).view(targets_BT.shape)
        column_P = target_P
        for cluster in range(1, config.clusters):
            in_tail_P = (target_P >= edges[cluster]) & (target_P < edges[cluster + 1])
            column_P = torch.where(in_tail_P, edges[1] + cluster - 1, column_P)
        loss_P = self._cross_entropy(self.head_logits(hidden_PD, linear=linear), column_P)
        for cluster, place_P in enumerate(places, start=1):
            if place_P.numel() or (self.every_tail and torch.is_grad_enabled()):
                tail_loss_P = self._cross_entropy(
                    self.cluster_logits(cluster, hidden_PD[place_P], linear=linear), target_P[place_P] - edges[cluster]
                )
                loss_P = loss_P.index_add(0, place_P, tail_loss_P)
        return loss_P.view(targets_BT.shape)

    def _scores_in_pieces(self, hidden_PD: Tensor) -> bool:
        """A plain softmax over many words, while it learns on a processor."""
        config = self.config
        plain = config.clusters == 1 and not config.has_projection(0) and config.vocabulary >= FEWEST
        there = hidden_PD.is_cpu and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_exporting()
        return plain and there and torch.is_grad_enabled()

    def weights_of_tail(self, cluster: int) -> list[Tensor]:
        """The weights that only the targets of this tail reach."""
        tables = [] if self.one_table or self.config.tie_embeddings else [self.output_tables[cluster]]
        name = str(cluster)
        return [*tables, *([self.output_projections[name]] if name in self.output_projections else [])]

    def log_probabilities(self, hidden: Tensor, *, linear: Linear = products.linear) -> Tensor:
        """[..., V]: the whole distribution, every tail opened."""
        config = self.config
        head = self._log_softmax(self.head_logits(hidden, linear=linear))
        parts = [head[..., : config.cluster_edges[1]]]
        for cluster in range(1, config.clusters):
            tail = self._log_softmax(self.cluster_logits(cluster, hidden, linear=linear))
            parts.append(tail + head[..., config.cluster_edges[1] + cluster - 1, None])
        return torch.cat(parts, dim=-1)

    def head_logits(self, hidden: Tensor, *, linear: Linear = products.linear) -> Tensor:
        """[..., cutoff + tails] before the softmax: the head's words, then one for each tail."""
        logits = self.cluster_logits(0, hidden, linear=linear)
        if self.tail_weight_CE is None:
            return logits
        tails = linear(self._project_out(0, hidden, linear), self.tail_weight_CE, self.tail_bias_C)
        return torch.cat([logits, tails], dim=-1)

    def cluster_logits(self, cluster: int, hidden: Tensor, *, linear: Linear = products.linear) -> Tensor:
        """[..., size of the cluster] before the softmax of its own."""
        low, high = self.config.cluster_edges[cluster : cluster + 2]
        tables = self.tables if self.config.tie_embeddings else self.output_tables
        weight_VE = tables[0][low:high] if self.one_table else tables[cluster]
        return linear(self._project_out(cluster, hidden, linear), weight_VE, self.bias_V[low:high])

    def _project_out(self, cluster: int, hidden: Tensor, linear: Linear) -> Tensor:
        if not self.config.has_projection(cluster):
            return hidden
        if self.config.ties_projection(cluster):
            projection_DE = self.input_projections["0" if self.one_table else str(cluster)]
        else:
            projection_DE = self.output_projections[str(cluster)]
        return linear(hidden, projection_DE.t(), None)

    @staticmethod
    def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(products.at_least_float32(logits), target, reduction="none", ignore_index=NOT_A_TARGET)

    @staticmethod
    def _log_softmax(logits: Tensor) -> Tensor:
        return F.log_softmax(products.at_least_float32(logits), dim=-1)
