"""Transformer-XL: embeddings, N layers that read memory and segment, losses in order. Knows no text, no optimiser, no file.

memory of layer n  m m m m |             what layer n was given at the last M positions, detached
segment            . . . . | 0 1 2 3     keys and values come from both, queries from the segment alone
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from transformer_xl.config import NOT_A_TARGET, ModelConfig
from transformer_xl.errors import InputError
from transformer_xl.model import products
from transformer_xl.model.attention import Attention, Mask, backend_of, segment_attention
from transformer_xl.model.dropout import dropout_at
from transformer_xl.model.encodings import build_encoding
from transformer_xl.model.layer import Attend, Layer, Product, by_module
from transformer_xl.model.memory import Memory
from transformer_xl.model.ngrams import NO_TOKEN, NgramEmbedding
from transformer_xl.model.protocol import Output, check_segment, check_tokens
from transformer_xl.model.table_gradient import TableGradient
from transformer_xl.model.vocabulary import Linear, Places, Vocabulary

AUXILIARY_TARGET_WEIGHT = 0.5


class TransformerXL(nn.Module):
    """The paper's model and, by `config.encoding`, those it is compared with."""

    memory_kind = Memory

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attend: Attention | None = None
        """Another attention than the backend's, such as `reference.reference_attend`, which gives the same answer slowly."""
        self.recompute = False
        """Activation checkpointing: the backward pass computes each layer again instead of keeping what is inside it."""
        self.reads_in: torch.dtype | None = None
        """What readers compute products in, where it is less than float32."""
        self.vocabulary = Vocabulary(config)
        self.ngrams = NgramEmbedding(config) if config.ngrams else None
        self.encoding = build_encoding(config)
        self.layers = nn.ModuleList(Layer(config, number=number) for number in range(config.n_layer))
        self.final_norm = nn.LayerNorm(config.d_model, eps=config.norm_eps) if config.final_norm else None
        self.embedding_dropout = dropout_at(config, "embedding")
        self.output_dropout = dropout_at(config, "output")
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
        if self.ngrams is not None:
            self.ngrams.initialise()

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
        sizes = {"layers": self.config.n_layer, "width": self.config.d_model, "recent": self.config.recent}
        return Memory.start(lanes=lanes, length=length, like=self.vocabulary.bias_V, full=zeros, **sizes)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        targets_BT: Tensor | None = None,
        memory: Memory | None = None,
        overlap: int = 0,
        progress: float = 0.0,
        places: Places | None = None,
    ) -> Output[Memory]:
        """One segment of every lane.

        `targets_BT` may be shorter than `tokens_BT`: then only the last positions are scored (half loss, or context fed again).
        `overlap`: the last tokens that the next segment will be fed again, which therefore stay out of the memory.
        `progress`: how much of training is over, from 0 to 1; Al-Rfou's intermediate losses fade by it.
        `places`: of the clusters of tokens and targets, where the host knows them; a device then need not be asked.
        """
        B, T = self._check(tokens_BT, targets_BT, overlap)
        memory = self._take(memory, lanes=B)
        gradient = None if targets_BT is None else self.vocabulary.table_gradient(tokens_BT)
        valid_B = memory.valid_B if memory.ragged else None
        inputs: list[Tensor] = []
        before = {"valid_B": valid_B, "recent_BP": memory.recent_BP}
        places = Places() if places is None else places
        how = {"gradient": gradient, "places": places.tokens}
        hidden_BTD = self.pass_through(tokens_BT, memory.layers, **before, **how, inputs=inputs)  # type: ignore[arg-type]
        kept = [values[:, : T - overlap] for values in inputs]
        new_memory = memory.extended(kept, limit=self.config.memory, tokens_BT=tokens_BT[:, : T - overlap])
        if targets_BT is None:
            return Output(loss_BT=None, hidden_BTD=hidden_BTD, memory=new_memory)
        scored_BTD = hidden_BTD[:, T - targets_BT.shape[1] :]
        return Output(
            loss_BT=self.vocabulary.loss(scored_BTD, targets_BT, gradient=gradient, places=places.targets),
            hidden_BTD=hidden_BTD,
            memory=new_memory,
            auxiliary_loss=self._auxiliary_loss(inputs[1:], scored_BTD, targets_BT, progress, places.targets),
        )

    def pass_through(
        self,
        tokens_BT: Tensor,
        memory: Sequence[Tensor],
        *,
        valid_B: Tensor | None,
        recent_BP: Tensor | None = None,
        gradient: TableGradient | None = None,
        places: tuple[Tensor, ...] | None = None,
        inputs: list[Tensor] | None = None,
    ) -> Tensor:
        """The last layer's output of tokens and memory that were checked: one [B, M, D] for each layer, of which `valid_B` are real (None: all)."""
        M, T = memory[0].shape[1], tokens_BT.shape[1]
        visible = self.config.visible_distance
        mask = Mask(memory=M, segment=T, valid_B=valid_B, visible_distance=visible, device=tokens_BT.device)
        by = self.attend or backend_of("attention", self.config, self.vocabulary.bias_V, training=self.training)
        attend = segment_attention(by, self.encoding.distances(M + T), mask)
        entered_BTD = self.enter(tokens_BT, gradient=gradient, recent_BP=recent_BP, places=places)
        return self.through_layers(entered_BTD, attend, memory=memory, inputs=inputs)

    def enter(
        self,
        tokens_BT: Tensor,
        *,
        linear: Linear = products.linear,
        gradient: TableGradient | None = None,
        recent_BP: Tensor | None = None,
        real_BT: Tensor | None = None,
        places: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """Tokens as the first layer is given them. For models that embed runs of tokens: those just before them, and which are real (None: all)."""
        embedded_BTD = self.vocabulary.embed(tokens_BT, linear=linear, gradient=gradient, places=places)
        if self.ngrams is not None:
            runs_BT = tokens_BT if real_BT is None else tokens_BT.masked_fill(~real_BT, NO_TOKEN)
            embedded_BTD = embedded_BTD + self.ngrams(runs_BT, recent_BP)
        return cast(Tensor, self.embedding_dropout(self.encoding.enter_first(embedded_BTD), 1))

    def through_layers(
        self,
        hidden_BTD: Tensor,
        attend: Attend,
        *,
        memory: Sequence[Tensor] = (),
        product: Product = by_module,
        inputs: list[Tensor] | None = None,
    ) -> Tensor:
        """The last layer's output. `inputs` takes what each layer was given, [B, T, D]: the memory to be."""
        for number, layer in enumerate(self.layers):
            if inputs is not None:
                inputs.append(hidden_BTD)
            entered_BTD = self.encoding.enter(hidden_BTD, layer=number)
            arguments = (entered_BTD, memory[number] if memory else None, attend, product)
            if self.recompute and torch.is_grad_enabled():
                hidden_BTD = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                hidden_BTD = layer(*arguments)
        if self.final_norm is not None:
            hidden_BTD = self.final_norm(hidden_BTD)
        return cast(Tensor, self.output_dropout(hidden_BTD, 1))

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
        recent_BP = memory.recent_BP
        kept = 0 if recent_BP is None else recent_BP.shape[1]
        if kept != self.config.recent:
            raise InputError(
                f"memory: it has {kept} recent tokens where this model has {self.config.recent}; pass what it returned"
            )
        if recent_BP is not None:
            check_tokens(recent_BP, vocabulary=self.config.vocabulary, name="memory: recent", lowest=-1)

    def _auxiliary_loss(
        self,
        lower: Sequence[Tensor],
        scored_BTD: Tensor,
        targets_BT: Tensor,
        progress: float,
        places: tuple[Tensor, ...] | None,
    ) -> Tensor | None:
        config, T = self.config, targets_BT.shape[1]
        if not self.training or not (config.auxiliary_layers or config.auxiliary_targets):
            return None
        total = scored_BTD.new_zeros(())
        if config.auxiliary_layers:
            for number, hidden_BTD in enumerate(lower, start=1):
                if progress < number / (2 * config.n_layer):
                    loss_BT = self.vocabulary.loss(hidden_BTD[:, -T:], targets_BT, places=places)
                    total = total + _mean(loss_BT, targets_BT)
        for ahead, classifier in enumerate(self.auxiliary_classifiers, start=1):
            # The target of a position is the next one's target, and the last position's lies in the next segment.
            if ahead < T:
                further_BT = targets_BT[:, ahead:]
                logits_BVT = classifier(scored_BTD[:, : T - ahead]).transpose(1, 2).float()
                loss_BT = F.cross_entropy(logits_BVT, further_BT, reduction="none", ignore_index=NOT_A_TARGET)
                total = total + AUXILIARY_TARGET_WEIGHT * _mean(loss_BT, further_BT)
        return total


def _mean(loss_BT: Tensor, targets_BT: Tensor) -> Tensor:
    return loss_BT.sum() / (targets_BT != NOT_A_TARGET).sum().clamp(min=1)
