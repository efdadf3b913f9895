"""One layer: attention over what came before and the segment, then the feed-forward part, each with its residual and norm.

The only body of a layer. Training, the engines and the Hugging Face classes hand in what differs: how queries meet keys (`attend`: memory as hidden
states, kept keys, somebody's cache) and how a matrix is multiplied (`product`). The compiled twin is `step` in `native/inference.cpp`.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transformer_xl.config import ModelConfig
from transformer_xl.model.dropout import Dropout, dropout_at
from transformer_xl.model.products import Linear

Attend = Callable[["Layer", Tensor, Tensor | None, Tensor], Tensor]
"""Of a layer, its queries [B, T, H*K], and keys and values [B, *, 2*H*K] of memory (None: none was handed in) and of the segment: what each query
gathers, [B, T, H*K]."""
Product = Callable[[nn.Linear, Tensor], Tensor]


def by_module(linear: nn.Linear, values: Tensor) -> Tensor:
    return cast(Tensor, linear(values))


class Norm(nn.LayerNorm):
    """nn.LayerNorm by name and by weights, which may come in half precision (fsdp): what it is given does not become so."""

    def forward(self, values: Tensor) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, values.dtype)
        return F.layer_norm(values, self.normalized_shape, self.weight.to(dtype), self.bias.to(dtype), self.eps)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, *, number: int) -> None:
        super().__init__()
        self.config, self.number = config, number
        D, HK = config.d_model, config.n_head * config.d_head
        self.query = Linear(D, HK, bias=False)
        self.key_value = Linear(D, 2 * HK, bias=False)
        self.attention_output = Linear(HK, D, bias=False)
        self.neighbours_WX = nn.Parameter(torch.zeros(config.neighbours, HK)) if config.neighbours else None
        self.attention_norm = Norm(D, eps=config.norm_eps)
        self.inner = Linear(D, config.d_inner)
        self.outer = Linear(config.d_inner, D)
        self.feed_forward_norm = Norm(D, eps=config.norm_eps)
        self.dropout = nn.ModuleDict(
            {site: dropout_at(config, site) for site in ("attention", "attention_output", "inner", "feed_forward")}
        )

    def forward(
        self, hidden_BTD: Tensor, memory_BMD: Tensor | None, attend: Attend, product: Product = by_module
    ) -> Tensor:
        pre = self.config.norm != "post"
        source_BTD = self.attention_norm(hidden_BTD) if pre else hidden_BTD
        asking_BTD = hidden_BTD if self.config.norm == "pre_keys" else source_BTD
        mixed_BTX = attend(
            self,
            product(self.query, asking_BTD),
            # Memory and segment are projected apart: no gradient is computed for what memory was made of.
            self.keys_of_memory(memory_BMD, product),
            product(self.key_value, source_BTD),
        )
        hidden_BTD = hidden_BTD + self.dropout["attention_output"](product(self.attention_output, mixed_BTX), 1)
        if not pre:
            hidden_BTD = self.attention_norm(hidden_BTD)
        inner_BTF = product(self.inner, self.feed_forward_norm(hidden_BTD) if pre else hidden_BTD)
        inner_BTF = cast(Dropout, self.dropout["inner"]).after_relu(inner_BTF, 1)
        hidden_BTD = hidden_BTD + self.dropout["feed_forward"](product(self.outer, inner_BTF), 1)
        return hidden_BTD if pre else self.feed_forward_norm(hidden_BTD)

    def keys_of_memory(self, memory_BMD: Tensor | None, product: Product) -> Tensor | None:
        if memory_BMD is None or not memory_BMD.shape[1]:
            return None
        return product(self.key_value, self.attention_norm(memory_BMD) if self.config.norm != "post" else memory_BMD)

    def start(self, product: Product = by_module) -> Tensor:
        """Keys and values of a zero vector, [2, H, K]: what is remembered before the first token, where that is zeros (`initial_memory`)."""
        zero_11D = self.query.weight.new_zeros(1, 1, self.config.d_model)
        kept_11X = cast(Tensor, self.keys_of_memory(zero_11D, product))
        return kept_11X.view(2, self.config.n_head, self.config.d_head)

    @property
    def attention_dropout(self) -> Dropout:
        return cast(Dropout, self.dropout["attention"])
