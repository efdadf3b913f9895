"""Transformer-XL: embeddings, N layers that read memory and segment, losses in order. Knows no text, no optimiser, no file.

memory of layer n  m m m m |             what layer n was given at the last M positions, detached
segment            . . . . | 0 1 2 3     keys and values come from both, queries from the segment alone
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from transformer_xl import native
from transformer_xl.config import ModelConfig
from transformer_xl.errors import InputError
from transformer_xl.model.adaptive_loss import TableGradient
from transformer_xl.model.attention import Sight, fused_attend
from transformer_xl.model.attention import attend as torch_attend
from transformer_xl.model.dropout import Dropout
from transformer_xl.model.encodings import Distances, build_encoding
from transformer_xl.model.memory import Memory
from transformer_xl.model.native_attention import native_attend
from transformer_xl.model.protocol import NOT_A_TARGET, Output, check_segment
from transformer_xl.model.vocabulary import Vocabulary

AUXILIARY_TARGET_WEIGHT = 0.5


class Layer(nn.Module):
    """Attention over memory and segment, then the feed-forward part, each with its residual and norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        D, HK = config.d_model, config.n_head * config.d_head
        self.query = nn.Linear(D, HK, bias=False)
        self.key_value = nn.Linear(D, 2 * HK, bias=False)
        self.attention_output = nn.Linear(HK, D, bias=False)
        self.attention_norm = nn.LayerNorm(D, eps=config.norm_eps)
        self.inner = nn.Linear(D, config.d_inner)
        self.outer = nn.Linear(config.d_inner, D)
        self.feed_forward_norm = nn.LayerNorm(D, eps=config.norm_eps)
        self.dropout = nn.ModuleDict(
            {site: _dropout(config, site) for site in ("attention", "attention_output", "inner", "feed_forward")}
        )

    def forward(
        self,
        hidden_BTD: Tensor,
        memory_BMD: Tensor,
        distances: Distances,
        sight: Sight | Tensor,
        attend: Callable[..., Tensor],
    ) -> Tensor:
        """`sight` may be a mask, [B, T, S], True where a query must not look."""
        pre = self.config.norm != "post"
        if attend is torch_attend and isinstance(sight, Sight) and self._compiled(hidden_BTD, distances):
            mixed_BTX = self._attend_natively(hidden_BTD, memory_BMD, distances, sight)
        else:
            mixed_BTX = self._attend(hidden_BTD, memory_BMD, distances, sight, attend)
        hidden_BTD = hidden_BTD + self.dropout["attention_output"](self.attention_output(mixed_BTX), 1)
        if not pre:
            hidden_BTD = self.attention_norm(hidden_BTD)
        inner_BTF = self.inner(self.feed_forward_norm(hidden_BTD) if pre else hidden_BTD)
        outer_BTD = self.outer(cast(Dropout, self.dropout["inner"]).after_relu(inner_BTF, 1))
        hidden_BTD = hidden_BTD + self.dropout["feed_forward"](outer_BTD, 1)
        return hidden_BTD if pre else self.feed_forward_norm(hidden_BTD)

    def _attend(
        self,
        hidden_BTD: Tensor,
        memory_BMD: Tensor,
        distances: Distances,
        sight: Sight | Tensor,
        attend: Callable[..., Tensor],
    ) -> Tensor:
        """[B, T, H*K] with torch's own operations, or with another attention."""
        B, T, H, K = *hidden_BTD.shape[:2], self.config.n_head, self.config.d_head
        source_BSD = torch.cat([memory_BMD, hidden_BTD], dim=1) if memory_BMD.shape[1] else hidden_BTD
        if self.config.norm != "post":
            source_BSD = self.attention_norm(source_BSD)
        asking_BTD = source_BSD[:, -T:] if self.config.norm == "pre" else hidden_BTD
        key_BHSK, value_BHSK = self.key_value(source_BSD).view(B, -1, 2, H, K).permute(2, 0, 3, 1, 4)
        query_BHTK = self.query(asking_BTD).view(B, T, H, K).transpose(1, 2)
        hidden_BTS = sight.hidden_BTS if isinstance(sight, Sight) else sight
        seen = {"distances": distances, "hidden_BTS": hidden_BTS}
        if attend is torch_attend and query_BHTK.is_cuda and not self._drops_over_time():
            rate = self._attention_dropout.rate if self.training else 0.0
            mixed_BHTK = fused_attend(query_BHTK, key_BHSK, value_BHSK, **seen, dropout=rate)  # type: ignore[arg-type]
        else:
            dropout = partial(self._attention_dropout, time_axis=2)
            mixed_BHTK = attend(query_BHTK, key_BHSK, value_BHSK, **seen, dropout=dropout)
        return mixed_BHTK.transpose(1, 2).reshape(B, T, H * K)

    def _attend_natively(self, hidden_BTD: Tensor, memory_BMD: Tensor, distances: Distances, sight: Sight) -> Tensor:
        """The same by the compiled kernels. Memory and segment are projected apart: no gradient is computed for what memory was made of."""
        B, T, H, K = *hidden_BTD.shape[:2], self.config.n_head, self.config.d_head
        pre = self.config.norm == "pre"
        source_BTD, kept_BMD = (
            self.attention_norm(part) if pre and part.shape[1] else part for part in (hidden_BTD, memory_BMD)
        )
        assert distances.relative_key_HSK is not None
        mixed_BTHK = native_attend(
            self.query(source_BTD).view(B, T, H, K),
            self.key_value(kept_BMD).view(B, -1, 2, H, K) if kept_BMD.shape[1] else kept_BMD.new_empty(B, 0, 2, H, K),
            self.key_value(source_BTD).view(B, T, 2, H, K),
            distances.relative_key_HSK.transpose(0, 1),
            distances.content_bias_HK,
            distances.position_bias_HK,
            lowest_B=sight.lowest_B(B),
            visible_distance=sight.visible_distance,
            dropout=self._attention_dropout.rate if self.training else 0.0,
        )
        return mixed_BTHK.view(B, T, H * K)

    @property
    def _attention_dropout(self) -> Dropout:
        return cast(Dropout, self.dropout["attention"])

    def _drops_over_time(self) -> bool:
        """Whether a mask of probabilities is held over time, which no fused attention does."""
        return self.training and self._attention_dropout.locked and self._attention_dropout.rate > 0

    def _compiled(self, hidden_BTD: Tensor, distances: Distances) -> bool:
        """Whether the kernels have what this layer needs: distances with keys of their own, and no dropout mask held over time."""
        plain = distances.relative_key_HSK is not None and distances.distance_bias_HS is None
        return (
            plain
            and not self._drops_over_time()
            and not torch.is_autocast_enabled(hidden_BTD.device.type)
            and native.usable(hidden_BTD)
        )


@dataclass(frozen=True, kw_only=True)
class Passed:
    """What a segment became on its way through the layers."""

    hidden_BTD: Tensor
    """The last layer's output."""
    inputs: tuple[Tensor, ...]
    """What each layer was given, [B, T, D]: the memory to be."""
    intermediate: tuple[Tensor, ...]
    """What each layer gave, [B, T, D]."""


class TransformerXL(nn.Module):
    """The paper's model and, by `config.encoding`, those it is compared with."""

    memory_kind = Memory

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attend: Callable[..., Tensor] = torch_attend
        """Which attention runs; `reference.reference_attend` gives the same answer slowly."""
        self.recompute = False
        """Activation checkpointing: the backward pass computes each layer again instead of keeping what is inside it."""
        self.vocabulary = Vocabulary(config)
        self.encoding = build_encoding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.final_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps) if config.final_norm else None
        self.embedding_dropout = _dropout(config, "embedding")
        self.output_dropout = _dropout(config, "output")
        self.auxiliary_classifiers = nn.ModuleList(
            nn.Linear(config.d_model, config.vocabulary) for _ in range(config.auxiliary_targets)
        )
        if not self.vocabulary.bias_V.is_meta:  # where torch would import its compiler, 1.8 s, to draw nothing
            self.initialise()

    def initialise(self) -> None:
        """As published: every weight normal, biases 0, LayerNorm weights around 1."""
        std = self.config.init_std
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, std)
                nn.init.zeros_(module.bias)
        self.vocabulary.initialise()
        self.encoding.initialise()

    def set_lengths(
        self, *, memory: int | None = None, clamp_len: int | None = None, same_length: bool | None = None
    ) -> None:
        """Other lengths for the same weights, as the paper evaluates with more memory than it trains with."""
        changes = {"memory": memory, "clamp_len": clamp_len, "same_length": same_length}
        config = replace(self.config, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
        self.config = self.encoding.config = config

    def start_memory(self, lanes: int, *, full_length: bool = False) -> Memory:
        """Memory before the first token of each lane. `full_length` gives the buffer its final shape at once."""
        zeros = self.config.initial_memory == "zeros"
        length = self.config.memory if zeros or full_length else 0
        like = self.vocabulary.bias_V
        return Memory.start(
            layers=self.config.n_layer, lanes=lanes, length=length, width=self.config.d_model, like=like, full=zeros
        )

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        targets_BT: Tensor | None = None,
        memory: Memory | None = None,
        overlap: int = 0,
        progress: float = 0.0,
    ) -> Output[Memory]:
        """One segment of every lane.

        `targets_BT` may be shorter than `tokens_BT`: then only the last positions are scored (half loss, or context fed again).
        `overlap`: the last tokens that the next segment will be fed again, which therefore stay out of the memory.
        `progress`: how much of training is over, from 0 to 1; Al-Rfou's intermediate losses fade by it.
        """
        B, T = self._check(tokens_BT, targets_BT, overlap)
        memory = self._take(memory, lanes=B)
        gradient = None if targets_BT is None else self.vocabulary.table_gradient(tokens_BT)
        valid_B = memory.valid_B if memory.ragged else None
        passed = self.pass_through(tokens_BT, memory.layers, valid_B=valid_B, gradient=gradient)
        hidden_BTD, inputs = passed.hidden_BTD, passed.inputs
        new_memory = memory.extended([values[:, : T - overlap] for values in inputs], limit=self.config.memory)
        if targets_BT is None:
            return Output(loss_BT=None, hidden_BTD=hidden_BTD, memory=new_memory)
        scored_BTD = hidden_BTD[:, T - targets_BT.shape[1] :]
        return Output(
            loss_BT=self.vocabulary.loss(scored_BTD, targets_BT, gradient=gradient),
            hidden_BTD=hidden_BTD,
            memory=new_memory,
            auxiliary_loss=self._auxiliary_loss(passed.intermediate[:-1], scored_BTD, targets_BT, progress),
        )

    def pass_through(
        self,
        tokens_BT: Tensor,
        memory: Sequence[Tensor],
        *,
        valid_B: Tensor | None,
        gradient: TableGradient | None = None,
    ) -> "Passed":
        """The layers alone, on tokens and memory that were checked: one [B, M, D] for each layer, of which `valid_B` are real (None: all)."""
        M, T = memory[0].shape[1], tokens_BT.shape[1]
        sight = Sight(
            memory=M, segment=T, valid_B=valid_B, visible_distance=self.config.visible_distance, device=tokens_BT.device
        )
        distances = self.encoding.distances(M + T)
        embedded_BTD = self.vocabulary.embed(tokens_BT, gradient=gradient)
        hidden_BTD = self.embedding_dropout(self.encoding.enter_first(embedded_BTD), 1)
        inputs, intermediate = [], []
        for number, layer in enumerate(self.layers):
            inputs.append(hidden_BTD)
            hidden_BTD = self.encoding.enter(hidden_BTD, layer=number)
            arguments = (hidden_BTD, memory[number], distances[number], sight, self.attend)
            if self.recompute and torch.is_grad_enabled():
                hidden_BTD = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                hidden_BTD = layer(*arguments)
            intermediate.append(hidden_BTD)
        if self.final_norm is not None:
            hidden_BTD = self.final_norm(hidden_BTD)
        return Passed(
            hidden_BTD=self.output_dropout(hidden_BTD, 1), inputs=tuple(inputs), intermediate=tuple(intermediate)
        )

    def log_probabilities(self, hidden_BTD: Tensor) -> Tensor:
        """[..., V] from the `hidden_BTD` of an output."""
        return self.vocabulary.log_probabilities(hidden_BTD)

    def _check(self, tokens_BT: Tensor, targets_BT: Tensor | None, overlap: int) -> tuple[int, int]:
        B, T = check_segment(tokens_BT, targets_BT, vocabulary=self.config.vocabulary)
        if not 0 <= overlap <= T:
            raise InputError(f"overlap: {overlap} is not within a segment of {T} tokens")
        return B, T

    def _take(self, memory: Memory | None, *, lanes: int) -> Memory:
        if memory is None:
            return self.start_memory(lanes)
        self.check_memory(memory, lanes=lanes)
        like = self.vocabulary.bias_V
        lower = torch.is_autocast_enabled(like.device.type)  # then some layers are given numbers of lower precision
        for number, layer in enumerate(memory.layers):
            if layer.device != like.device or (layer.dtype != like.dtype and not lower):
                raise InputError(
                    f"memory: layer {number} is {layer.dtype} on {layer.device} where the model is {like.dtype} on {like.device}; move it with"
                    " memory.to(device, dtype=...)"
                )
        memory = memory.truncated(self.config.memory)
        return replace(memory, layers=tuple(layer.detach() for layer in memory.layers))

    def check_memory(self, memory: Memory, *, lanes: int) -> None:
        """Whether this model could have returned it for so many lanes."""
        memory.check()
        shape = [len(memory.layers), *memory.layers[0].shape]
        if (shape[0], shape[1], shape[3]) != (self.config.n_layer, lanes, self.config.d_model):
            raise InputError(
                f"memory: shape {shape} does not fit {self.config.n_layer} layers, {lanes} lanes, width {self.config.d_model}; pass what this"
                " model returned for these lanes, or none"
            )

    def _auxiliary_loss(
        self, intermediate: Sequence[Tensor], scored_BTD: Tensor, targets_BT: Tensor, progress: float
    ) -> Tensor | None:
        config, T = self.config, targets_BT.shape[1]
        if not self.training or not (config.auxiliary_layers or config.auxiliary_targets):
            return None
        total = scored_BTD.new_zeros(())
        if config.auxiliary_layers:
            for number, hidden_BTD in enumerate(intermediate, start=1):
                if progress < number / (2 * config.n_layer):
                    total = total + _mean(self.vocabulary.loss(hidden_BTD[:, -T:], targets_BT), targets_BT)
        for ahead, classifier in enumerate(self.auxiliary_classifiers, start=1):
            if (
                ahead < T
            ):  # the target of a position is the next one's target, and the last position's lies in the next segment
                further_BT = targets_BT[:, ahead:]
                logits_BVT = classifier(scored_BTD[:, : T - ahead]).transpose(1, 2).float()
                loss_BT = F.cross_entropy(logits_BVT, further_BT, reduction="none", ignore_index=NOT_A_TARGET)
                total = total + AUXILIARY_TARGET_WEIGHT * _mean(loss_BT, further_BT)
        return total


def _mean(loss_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return loss_BT.sum() / (targets_BT != NOT_A_TARGET).sum().clamp(min=1)


def _dropout(config: ModelConfig, site: str) -> Dropout:
    return Dropout(config.dropout_rate(site), locked=site in config.locked_dropout)
