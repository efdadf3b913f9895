"""Reads text with a trained model and computes nothing twice: keys, values and projected relative keys are kept (`cache.py`), where training must
make them anew from hidden states (there the weights change).

Exact: the same numbers as the model's own forward with memory M, under either rule of sight.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from transformer_xl import native
from transformer_xl.errors import CheckpointError, InputError, shown, suggest
from transformer_xl.inference.cache import Cache, cache_kinds
from transformer_xl.inference.one_token import OneToken
from transformer_xl.inference.reader import Reader
from transformer_xl.inference.weights import Linear, WeightKind
from transformer_xl.model import AnyMemory, Memory, TransformerXL
from transformer_xl.model.attention import Mask, attend, backend_of, from_neighbours, heads
from transformer_xl.model.encodings import Distances
from transformer_xl.model.layer import Layer
from transformer_xl.model.protocol import NOT_FINITE, check_tokens
from transformer_xl.tensor_files import Kind, TensorFile

Sight = Literal["last", "segment"]
"""What a token sees. last: itself and the M before it, however the text is cut. segment: the paper's rule, the M before its segment and all of it before
the token. A model with `same_length` keeps its own."""


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


class Engine(Reader):
    model: TransformerXL
    kept: Cache

    def __init__(
        self,
        model: TransformerXL,
        *,
        lanes: int = 1,
        memory: int | None = None,
        sight: Sight = "last",
        weights: WeightKind = "exact",
    ) -> None:
        config = model.config
        self.memory = config.memory if memory is None else memory
        for name, value, known in (("sight", sight, get_args(Sight)), ("weights", weights, get_args(WeightKind))):
            if value not in known:
                raise InputError(f"{name}: {value!r} is unknown{suggest(str(value), known)}")
        if type(lanes) is not int or type(self.memory) is not int:
            raise InputError(f"lanes {lanes!r} and memory {self.memory!r} must be whole numbers")
        if lanes < 1 or self.memory < 0:
            raise InputError(
                f"an engine of {shown(lanes)} lanes and memory {shown(self.memory)} cannot be; give at least 1 lane and memory 0 or more"
            )
        if config.encoding in ("absolute", "per_layer"):
            raise InputError(
                f"encoding {config.encoding} has no memory to keep; read its text in whole windows instead"
            )
        like = model.vocabulary.bias_V
        if weights == "int8" and like.dtype != torch.float32:
            raise InputError(f"weights: 'int8' is for float32 models, and this one is {like.dtype}; take 'exact'")
        half = None if like.is_cpu else model.reads_in  # on a processor the kernels want float32
        cache = partial(Cache, config, lanes=lanes, memory=self.memory, like=like.new_empty(0, dtype=half))
        super().__init__(model, lanes=lanes, kept=cache)
        self.sight = sight
        self.compiled = backend_of("layers", config, like) == "native"
        self.linear = Linear(weights, compiled=native.usable(like), half=half)
        self.writes = self.compiled and native.supports("words", config)
        self._weights_at = like.data_ptr()
        self._distances: list[Distances] = []
        self._distances_known = 0
        self._panels: Panels | None = None
        self._table: native.Layers | None = None
        self._table_of: object = None
        """The buffers that `_table` points at."""
        self._one_token: OneToken | None = None
        self.reset(range(lanes))

    @property
    def valid_B(self) -> Tensor:
        """How many kept positions of each lane are real."""
        return self.kept.valid_B

    def _at_once(self, tokens: int) -> int:
        """Under the rule `segment` the tokens are one segment."""
        return tokens if self.sight == "segment" and not self.model.config.same_length else self.chunk

    def _read(self, tokens_BT: Tensor) -> Tensor:
        self._check_model()
        self.kept.make_room(tokens_BT.shape[1])
        hidden_BTD = self.model.enter(tokens_BT, linear=self.linear.exact, recent_BP=self.kept.recent_BP)
        hidden_BTD = self._through_layers(hidden_BTD.to(self.model.vocabulary.bias_V.dtype))
        self.kept.advance(tokens_BT)
        return hidden_BTD

    @torch.inference_mode()
    def write(self, tokens: Sequence[int], choices: "ctypes.Array[native.Choice]", steps: int = 1) -> list[list[int]]:
        """Of a plain softmax."""
        self._check_model()
        self.kept.make_room(steps)
        layers, lowest_B, seen = self._for_kernels(1)
        tokens_B, recent_BP = torch.tensor(tokens), self.kept.recent_BP
        drawn_NB, self.last_hidden_BD = layers.write(tokens_B, choices, lowest_B, recent_BP, steps=steps, **seen)
        if bool((drawn_NB < 0).any()):
            raise InputError(NOT_FINITE)
        self.kept.advance(torch.cat([tokens_B[None], drawn_NB[:-1]]).t())
        self.read_B = self.read_B + steps
        drawn: list[list[int]] = drawn_NB.tolist()
        return drawn

    @property
    def most_steps(self) -> int:
        """Where a token sees as far wherever a call begins, and the buffers need not grow."""
        if not self.writes or self._visible_distance() is None:
            return 1
        width = self.kept.keys[0].shape[2]
        return min(self._for_kernels(1)[0].most_steps, width - self.kept.end or width - self.memory)

    def _reset(self, lanes: list[int]) -> None:
        """With nothing, or with the zero vectors that the model's convention attends to."""
        zeros = self.model.config.initial_memory == "zeros"
        layers = cast(list[Layer], list(self.model.layers)) if zeros else []
        self.kept.reset(lanes, start=[layer.start(self._product) for layer in layers])

    @torch.inference_mode()
    def remember(self, memory: AnyMemory) -> None:
        """Its keys and values, by this engine's weights: a model that moved needs nothing else made anew."""
        assert isinstance(memory, Memory), "what another kind of model remembers"
        self.model.check_memory(memory, lanes=self.lanes)
        memory = memory.truncated(self.memory)
        B, M, H, K = memory.lanes, memory.length, self.model.config.n_head, self.model.config.d_head
        kept = slice(self.kept.end - M, self.kept.end)
        for layer, memory_BMD in zip(cast(list[Layer], list(self.model.layers)), memory.layers, strict=True):
            known_BMX = layer.keys_of_memory(memory_BMD, self._product)
            if known_BMX is None:
                continue
            key_BHMK, value_BHMK = known_BMX.view(B, M, 2, H, K).permute(2, 0, 3, 1, 4)
            self.kept.keys[layer.number][:, :, kept] = key_BHMK
            self.kept.values[layer.number][:, :, kept] = value_BHMK
        self.kept.valid_B, self.read_B = memory.valid_B.clone(), memory.valid_B.clone()
        if memory.recent_BP is not None:
            self.kept.recent_BP = memory.recent_BP.clone()

    def about(self) -> dict[str, str]:
        return {"sight": self.sight}

    @classmethod
    def checked_kinds(
        cls, file: TensorFile, model: Any, *, lanes: int, memory: int | None = None, sight: Sight = "last", **how: Any
    ) -> dict[str, Kind]:
        file.check_metadata(("sight",))
        if file.metadata.get("sight", sight) != sight:
            raise CheckpointError(
                f"{file.path} was saved under the rule of sight {file.metadata['sight']!r}, not {sight!r}"
            )
        memory = model.config.memory if memory is None else memory
        return cache_kinds(model.config, lanes=lanes, memory=memory, dtype=model.vocabulary.bias_V.dtype)

    def take(self, path: Path | str, tensors: Mapping[str, Tensor]) -> None:
        memory, zeros = self.memory, self.model.config.initial_memory == "zeros"
        for lane, (valid, read) in enumerate(zip(tensors["valid"].tolist(), self.read_B.tolist(), strict=True)):
            if valid != (memory if zeros else min(read, memory)):
                raise CheckpointError(
                    f"{path}: valid is {valid} in lane {lane}, which no memory of {memory} can be after {read:,} tokens"
                )
        if "recent" in tensors:
            try:
                check_tokens(tensors["recent"], vocabulary=self.model.config.vocabulary, name="recent", lowest=-1)
            except InputError as error:
                raise CheckpointError(f"{path}: {error}") from None
        self.kept.take(tensors)

    # --- inside

    def _check_model(self) -> None:
        if self.model.vocabulary.bias_V.data_ptr() != self._weights_at:
            raise InputError("the model's weights were moved or replaced since this engine was made; make a new engine")

    def _product(self, linear: nn.Linear, values: Tensor) -> Tensor:
        return self.linear(values, linear.weight, linear.bias)

    def _through_layers(self, hidden_BTD: Tensor) -> Tensor:
        if self.compiled:
            return self._through_kernels(hidden_BTD)
        if hidden_BTD.shape[1] == 1 and hidden_BTD.is_cuda and self.model.attend is None:
            return self._through_one_step(hidden_BTD)
        return self._through_torch(hidden_BTD)

    def _through_one_step(self, hidden_B1D: Tensor) -> Tensor:
        if self._one_token is None or not self._one_token.fits(self.kept):
            limit, layers = self._visible_distance(), range(self.model.config.n_layer)
            self._one_token = OneToken(
                self.model,
                self.kept,
                [self._distances_of(layer, self.memory + 1) for layer in layers],
                reach=self.memory if limit is None else limit,
                product=self._product,
            )
        return self._one_token(hidden_B1D)

    def _through_kernels(self, hidden_BTD: Tensor) -> Tensor:
        layers, lowest_B, seen = self._for_kernels(hidden_BTD.shape[1])
        if hidden_BTD.shape[1] == 1:
            hidden_BD = hidden_BTD[:, 0].contiguous()
            layers.step(hidden_BD, lowest_B, **seen)
            return hidden_BD[:, None]

        def attend_kept(layer: Layer, query_BTX: Tensor, _: Tensor | None, key_value_BTX: Tensor) -> Tensor:
            return layers.attend(layer.number, query_BTX, key_value_BTX, lowest_B, **seen)

        return self.model.through_layers(hidden_BTD, attend_kept, product=self._product)

    def _for_kernels(self, tokens: int) -> tuple[native.Layers, Tensor, dict[str, int]]:
        """The layers, where each lane's memory begins, where new positions go and how far they see."""
        limit = self._visible_distance()
        layers = self._known_layers(self.memory + tokens if limit is None else limit + 1)
        seen = {"end": self.kept.end, "limit": native.UNLIMITED if limit is None else limit}
        return layers, self.kept.end - self.kept.valid_B, seen

    def _through_torch(self, hidden_BTD: Tensor) -> Tensor:
        T, M = hidden_BTD.shape[1], min(self.memory, int(self.valid_B.max()))
        valid_B = None if bool((self.valid_B >= M).all()) else self.valid_B
        limit = self._visible_distance()
        mask = Mask(memory=M, segment=T, valid_B=valid_B, visible_distance=limit, device=hidden_BTD.device)

        def attend_kept(layer: Layer, query_BTX: Tensor, _: Tensor | None, key_value_BTX: Tensor) -> Tensor:
            (query_BHTK,), new = heads(layer, query_BTX), heads(layer, key_value_BTX)
            known = self.kept.keep(layer.number, *new, seen=M)
            seen: dict[str, Any] = {"distances": self._distances_of(layer.number, M + T), "mask_BTS": mask.cells_BTS}
            by = self.model.attend or attend
            mixed_BHTK = by(query_BHTK, *known, **seen, dropout=lambda probability_BHTS: probability_BHTS)
            mixed_BTX = mixed_BHTK.transpose(1, 2).reshape(query_BTX.shape)
            if layer.neighbours_WX is None:
                return mixed_BTX
            real_BHSK = known[1]
            if mask.lowest_B is not None:
                unreal_BS = torch.arange(M + T, device=mask.device) < mask.lowest_B[:, None]
                real_BHSK = real_BHSK.masked_fill(unreal_BS[:, None, :, None], 0.0)
            value_BSX = real_BHSK.transpose(1, 2).flatten(2)
            return mixed_BTX + from_neighbours(layer, value_BSX, segment=T, reach=limit)

        return self.model.through_layers(hidden_BTD, attend_kept, product=self._product)

    def _visible_distance(self) -> int | None:
        if self.model.config.same_length:
            return replace(self.model.config, memory=self.memory).visible_distance
        return self.memory if self.sight == "last" else None

    def _distances_of(self, layer: int, length: int) -> Distances:
        """The projected relative keys of the `length` nearest distances: the end of a table that is made once and grows rarely."""
        if self._distances_known < length:
            self._distances_known = max(length, self.memory + self.chunk)
            self._distances = self.model.encoding.distances(self._distances_known)
        return self._distances[layer].nearest(length)

    def _known_layers(self, distances: int) -> native.Layers:
        """What the kernels read, for this many distances: made anew only when something moved."""
        farthest = self.model.encoding.farthest
        distances = distances if farthest is None else min(distances, farthest + 1)
        if self._panels is None or self._panels.distances < distances:
            self._panels = Panels.of(self.model, distances)
            self._table = None
        if self._table is None or self._table_of is not self.kept.keys:
            self._table, self._table_of = self._make_table(self._panels), self.kept.keys
        return self._table

    def _make_table(self, panels: Panels) -> native.Layers:
        config, stored = self.model.config, self.linear.stored
        matrices, others = [], []
        for number, layer in enumerate(cast(list[Layer], list(self.model.layers))):
            linears = {"query": layer.query, "key_value": layer.key_value, "output": layer.attention_output}
            linears |= {"inner": layer.inner, "outer": layer.outer}
            matrices.append({name: stored(linear.weight) for name, linear in linears.items()})
            parts: dict[str, Tensor | None] = {"inner_bias": layer.inner.bias, "outer_bias": layer.outer.bias}
            for name, norm in (("attention_norm", layer.attention_norm), ("feed_norm", layer.feed_forward_norm)):
                parts |= {name: norm.weight, f"{name}_bias": norm.bias}
            parts |= {"keys": self.kept.keys[number], "values": self.kept.values[number]}
            parts["neighbours"] = None if layer.neighbours_WX is None else layer.neighbours_WX.detach()
            others.append(parts | panels.layers[number])
        end = self.model.final_norm
        layers = native.Layers(
            matrices,
            others,
            norm=(None, None) if end is None else (end.weight, end.bias),
            eps=config.norm_eps,
            dtype=self.kept.keys[0].dtype,
            distances=panels.distances,
            pre_norm=config.norm == "pre",
            lanes=self.lanes,
            heads=config.n_head,
            width=config.d_head,
            model=config.d_model,
            inner=config.d_inner,
            room=self.kept.keys[0].shape[2],
            neighbours=config.neighbours,
        )
        if self.writes:
            words = self.model.vocabulary
            output_VD = (words.tables if config.tie_embeddings else words.output_tables)[0]
            layers.take_words(words.tables[0], stored(output_VD), words.bias_V, scale=config.embedding_scale)
            if self.model.ngrams is not None:
                found = self.model.ngrams
                layers.take_ngrams(found.tables_GRE.detach(), found.projection.weight.detach(), orders=config.ngrams)
        return layers
