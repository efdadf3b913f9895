"""Reads text with a trained model and computes nothing twice: keys, values and projected relative keys are kept, where training must make
them anew from hidden states (there the weights change).

    positions   . . . m m m m m | 0 1 2 . . .        one buffer per layer; `end` moves right as tokens come,
                      ^ end-M   ^ end      ^ room    and the last M are moved to the front when room runs out

Exact: the same numbers as the model's own forward with memory M, under either rule of sight.
"""

import ctypes
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from transformer_xl import native
from transformer_xl.config import ModelConfig
from transformer_xl.errors import CheckpointError, InputError, shown, suggest
from transformer_xl.inference.panels import Panels
from transformer_xl.inference.reader import Reader, chunk_of, joined_last_hidden
from transformer_xl.inference.saved import SAVED, saved_lanes, saved_tensors
from transformer_xl.inference.weights import Linear, WeightKind
from transformer_xl.model import TransformerXL
from transformer_xl.model.attention import hidden_keys
from transformer_xl.model.encodings import Distances
from transformer_xl.model.memory import check_fits
from transformer_xl.model.protocol import NOT_FINITE
from transformer_xl.model.transformer import Layer
from transformer_xl.tensor_files import Kind, reading, write_tensors

Sight = Literal["last", "segment"]
"""What a token sees. last: itself and the M before it, however the text is cut. segment: the paper's rule, the M before its segment and all of it before
the token. A model with `same_length` keeps its own."""
ROOM = 512
"""Positions of a buffer beyond its memory, or half the memory if that is more: so many tokens pass between two moves."""


def kept_bytes(config: ModelConfig, *, lanes: int) -> int:
    """What the keys and values of an engine take in float32."""
    return lanes * config.n_layer * 2 * room(config.memory) * config.n_head * config.d_head * 4


def table_numbers(config: ModelConfig, *, distances: int) -> int:
    """What the relative keys of so many distances take while they are laid out: sines, angles, and each layer's keys twice."""
    return distances * (4 * config.d_model + 2 * config.n_layer * config.n_head * config.d_head)


def room(memory: int) -> int:
    return memory + max(ROOM, memory // 2)


class Engine(Reader):
    model: TransformerXL

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
        self.model = model
        self.sight = sight
        self._compiled = native.usable(like)
        self.linear = Linear(weights, compiled=self._compiled)
        shape = (lanes, config.n_head, room(self.memory), config.d_head)
        numbers = 2 * config.n_layer * prod(shape) + table_numbers(config, distances=self.memory + chunk_of(lanes))
        check_fits(numbers, like=like, what=f"a memory of {shown(self.memory)} positions for {shown(lanes)} lanes")
        self.valid_B = torch.zeros(lanes, dtype=torch.int64)
        """How many kept positions of each lane are real."""
        self.read_B = torch.zeros(lanes, dtype=torch.int64)
        self.last_hidden_BD = None
        self._layers = cast(list[Layer], list(model.layers))
        self._weights_at = like.data_ptr()
        self._end = self.memory
        self._keys = [like.new_zeros(shape) for _ in range(config.n_layer)]
        self._values = [like.new_zeros(shape) for _ in range(config.n_layer)]
        self._spare: list[Tensor] = []
        """The buffers of keys, then of values, with lanes to spare: `_keys` and `_values` are their first lanes. Empty where there are none to spare."""
        self._distances: list[Distances] = []
        self._panels: Panels | None = None
        self._table: native.Layers | None = None
        self.reset(range(lanes))

    @torch.inference_mode()
    def read(self, tokens_BT: Tensor) -> Tensor:
        """Under the rule `segment` the tokens are one segment."""
        self._check_reading(tokens_BT)
        whole = self.sight == "segment" and not self.model.config.same_length
        step = tokens_BT.shape[1] if whole else self.chunk
        parts = [self._read(tokens_BT[:, start : start + step]) for start in range(0, tokens_BT.shape[1], step)]
        hidden_BTD = torch.cat(parts, dim=1)
        self.last_hidden_BD = hidden_BTD[:, -1]
        return hidden_BTD

    @property
    def writes(self) -> bool:
        """Whether `write` can be asked: of a plain softmax, which the kernels know."""
        config = self.model.config
        return self._compiled and config.clusters == 1 and not config.has_projection(0)

    @torch.inference_mode()
    def write(self, tokens: Sequence[int], choices: "ctypes.Array[native.Choice]") -> list[int]:
        """Each lane reads its token, and draws the next one, all below Python: what `read` and then `Distribution` would give, word for word."""
        self._check_model()
        self._make_room(1)
        tokens_B = torch.tensor(tokens)
        layers, lowest_B, seen = self._for_kernels(1)
        self.last_hidden_BD = layers.write(tokens_B, choices, lowest_B, **seen)
        self._advance(1)
        drawn: list[int] = tokens_B.tolist()
        if min(drawn) < 0:
            raise InputError(NOT_FINITE)
        return drawn

    @torch.inference_mode()
    def reset(self, lanes: Iterable[int]) -> None:
        """With nothing, or with the zero vectors that the model's convention attends to."""
        chosen = list(lanes)
        self._check_lanes(chosen)
        self.read_B[chosen] = 0
        zeros = self.model.config.initial_memory == "zeros"
        self.valid_B[chosen] = self.memory if zeros else 0
        for number, layer in enumerate(self._layers if zeros else ()):
            zero_D = self._keys[0].new_zeros(self.model.config.d_model)
            prepared_D = layer.attention_norm(zero_D) if self.model.config.norm == "pre" else zero_D
            kept_2HK = self.linear(prepared_D, layer.key_value.weight).view(2, self.model.config.n_head, -1)
            for buffer, kept_HK in zip((self._keys[number], self._values[number]), kept_2HK, strict=True):
                buffer[chosen, :, self._end - self.memory : self._end] = kept_HK[:, None]

    def select(self, lanes: Iterable[int]) -> "Engine":
        chosen = list(lanes)
        self._check_lanes(chosen)
        other = copy(self)
        other._table, other._spare = None, []
        other._keys = [keys[chosen] for keys in self._keys]
        other._values = [values[chosen] for values in self._values]
        other.valid_B, other.read_B = self.valid_B[chosen], self.read_B[chosen]
        other.last_hidden_BD = None if self.last_hidden_BD is None else self.last_hidden_BD[chosen]
        return other

    @classmethod
    @torch.inference_mode()
    def joined(cls, engines: Sequence["Engine"]) -> "Engine":
        first = engines[0]
        if any(engine.model is not first.model or engine.memory != first.memory for engine in engines):
            raise InputError("engines of several models or memories cannot be joined; select or fork them from one")
        other = first.select([0] * sum(engine.lanes for engine in engines))
        for name in ("_keys", "_values"):
            for number, buffer in enumerate(getattr(other, name)):
                kept = [each._remembered(getattr(each, name)[number]) for each in engines]
                buffer[:, :, other._end - other.memory : other._end] = torch.cat(kept)
        other.valid_B = torch.cat([engine.valid_B for engine in engines])
        other.read_B = torch.cat([engine.read_B for engine in engines])
        other.last_hidden_BD = joined_last_hidden(engines)
        return other

    @torch.inference_mode()
    def grown(self, engines: Sequence["Engine"]) -> "Engine":
        """In place: there are lanes to spare, and only when they run out do its own lanes move, into buffers twice as large."""
        first, lanes = self.lanes, self.lanes + sum(engine.lanes for engine in engines)
        buffers = [*self._keys, *self._values]
        if not self._spare or len(self._spare[0]) < lanes:
            self._spare = [buffer.new_zeros(max(lanes, 2 * first), *buffer.shape[1:]) for buffer in buffers]
            for spare, buffer in zip(self._spare, buffers, strict=True):
                spare[:first, :, self._end - self.memory : self._end] = self._remembered(buffer)
        for engine in engines:
            if engine.model is not self.model or engine.memory != self.memory:
                raise InputError("engines of several models or memories cannot be joined; select or fork them from one")
            taken = slice(first, first + engine.lanes)
            for spare, buffer in zip(self._spare, [*engine._keys, *engine._values], strict=True):
                spare[taken, :, self._end - self.memory : self._end] = engine._remembered(buffer)
            first += engine.lanes
        self.last_hidden_BD = joined_last_hidden([self, *engines])
        self.valid_B = torch.cat([self.valid_B, *(engine.valid_B for engine in engines)])
        self.read_B = torch.cat([self.read_B, *(engine.read_B for engine in engines)])
        self._use_spare(lanes)
        return self

    @torch.inference_mode()
    def without(self, lanes: Collection[int]) -> tuple["Engine", list[int]]:
        """In place: the last lanes move into the places that become free."""
        self._check_lanes(list(lanes))
        order = list(range(self.lanes))
        for lane in sorted(lanes, reverse=True):
            last = order.pop()
            if lane < len(order):
                order[lane] = last
        if not self._spare:
            self._spare = [*self._keys, *self._values]
        for place, lane in enumerate(order):
            if lane != place:
                kept = slice(self._end - int(self.valid_B[lane]), self._end)
                for buffer in self._spare:
                    buffer[place, :, kept] = buffer[lane, :, kept]
        self.valid_B, self.read_B = self.valid_B[order], self.read_B[order]
        self.last_hidden_BD = None if self.last_hidden_BD is None else self.last_hidden_BD[order]
        self._use_spare(len(order))
        return self, order

    def save(self, path: Path | str) -> None:
        begin = self._end - self.memory
        tensors = {"valid": self.valid_B, "read": self.read_B}
        for number, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            tensors[f"keys.{number}"] = keys[:, :, begin : self._end].contiguous()
            tensors[f"values.{number}"] = values[:, :, begin : self._end].contiguous()
        if self.last_hidden_BD is not None:
            tensors["last_hidden"] = self.last_hidden_BD.contiguous()
        write_tensors(path, tensors, metadata={"sight": self.sight})

    @classmethod
    def restore(
        cls,
        model: TransformerXL,
        path: Path | str,
        *,
        lanes: int | None = None,
        memory: int | None = None,
        sight: Sight = "last",
        weights: WeightKind = "exact",
    ) -> "Engine":
        """As it was saved: with as many lanes (where they are told), the same memory and the same rule of sight."""
        config, memory = model.config, model.config.memory if memory is None else memory
        with reading(path, what=SAVED) as file:
            lanes = saved_lanes(file, asked=lanes)
            file.check_metadata(("sight",))
            if file.metadata.get("sight", sight) != sight:
                raise CheckpointError(
                    f"{path} was saved under the rule of sight {file.metadata['sight']!r}, not {sight!r}"
                )
            kept = Kind(model.vocabulary.bias_V.dtype, (lanes, config.n_head, memory, config.d_head))
            names = [f"{part}.{number}" for part in ("keys", "values") for number in range(config.n_layer)]
            wanted = {**dict.fromkeys(names, kept), "valid": Kind(torch.int64, (lanes,))}
            tensors = saved_tensors(file, wanted, model=model, lanes=lanes)
        valid_B, read_B = tensors["valid"], tensors["read"]
        for lane, (valid, read) in enumerate(zip(valid_B.tolist(), read_B.tolist(), strict=True)):
            if valid != (memory if config.initial_memory == "zeros" else min(read, memory)):
                raise CheckpointError(
                    f"{path}: valid is {valid} in lane {lane}, which no memory of {memory} can be after {read:,} tokens"
                )
        try:
            engine = cls(model, lanes=lanes, memory=memory, sight=sight, weights=weights)
        except (InputError, RuntimeError):  # the second is torch's way to say that there is no room
            raise CheckpointError(f"{path} has {lanes:,} lanes, for which there is no memory here") from None
        for number in range(config.n_layer):
            engine._keys[number][:, :, :memory] = tensors[f"keys.{number}"]
            engine._values[number][:, :, :memory] = tensors[f"values.{number}"]
        engine.valid_B, engine.read_B, engine.last_hidden_BD = valid_B, read_B, tensors.get("last_hidden")
        return engine

    # --- inside

    def _remembered(self, buffer: Tensor) -> Tensor:
        return buffer[:, :, self._end - self.memory : self._end]

    def _use_spare(self, lanes: int) -> None:
        half = len(self._keys)
        self._keys = [buffer[:lanes] for buffer in self._spare[:half]]
        self._values = [buffer[:lanes] for buffer in self._spare[half:]]
        self._table = None

    def _read(self, tokens_BT: Tensor) -> Tensor:
        model, T = self.model, tokens_BT.shape[1]
        self._check_model()
        self._make_room(T)
        hidden_BTD = model.encoding.enter_first(model.vocabulary.embed(tokens_BT, linear=self.linear.exact))
        hidden_BTD = self._through_kernels(hidden_BTD) if self._compiled else self._through_torch(hidden_BTD)
        self._advance(T)
        return hidden_BTD

    def _check_model(self) -> None:
        if self.model.vocabulary.bias_V.data_ptr() != self._weights_at:
            raise InputError("the model's weights were moved or replaced since this engine was made; make a new engine")

    def _advance(self, tokens: int) -> None:
        self._end += tokens
        self.valid_B = (self.valid_B + tokens).clamp_(max=self.memory)
        self.read_B = self.read_B + tokens

    def _through_kernels(self, hidden_BTD: Tensor) -> Tensor:
        layers, lowest_B, seen = self._for_kernels(hidden_BTD.shape[1])
        if hidden_BTD.shape[1] == 1:
            hidden_BD = hidden_BTD[:, 0].contiguous()
            layers.step(hidden_BD, lowest_B, **seen)
            return hidden_BD[:, None]

        def attend(number: int, query_BTX: Tensor, key_value_BTX: Tensor) -> Tensor:
            return layers.attend(number, query_BTX, key_value_BTX, lowest_B, **seen)

        return self._through_all(hidden_BTD, attend)

    def _for_kernels(self, tokens: int) -> tuple[native.Layers, Tensor, dict[str, int]]:
        """The layers, where each lane's memory begins, where new positions go and how far they see."""
        limit = self._visible_distance()
        layers = self._known_layers(self.memory + tokens if limit is None else limit + 1)
        seen = {"end": self._end, "limit": native.UNLIMITED if limit is None else limit}
        return layers, self._end - self.valid_B, seen

    def _through_torch(self, hidden_BTD: Tensor) -> Tensor:
        B, T, _ = hidden_BTD.shape
        M, H, K = min(self.memory, int(self.valid_B.max())), self.model.config.n_head, self.model.config.d_head
        valid_B = None if bool((self.valid_B >= M).all()) else self.valid_B
        hidden_BTS = hidden_keys(
            memory=M, segment=T, valid_B=valid_B, visible_distance=self._visible_distance(), device=hidden_BTD.device
        )
        begin, end = self._end - M, self._end + T

        def attend(number: int, query_BTX: Tensor, key_value_BTX: Tensor) -> Tensor:
            key_BHTK, value_BHTK = key_value_BTX.view(B, T, 2, H, K).permute(2, 0, 3, 1, 4)
            self._keys[number][:, :, self._end : end] = key_BHTK
            self._values[number][:, :, self._end : end] = value_BHTK
            mixed_BHTK = self.model.attend(
                query_BTX.view(B, T, H, K).transpose(1, 2),
                self._keys[number][:, :, begin:end],
                self._values[number][:, :, begin:end],
                distances=self._distances_of(number, M + T),
                hidden_BTS=hidden_BTS,
                dropout=lambda probability_BHTS: probability_BHTS,
            )
            return mixed_BHTK.transpose(1, 2).reshape(B, T, H * K)

        return self._through_all(hidden_BTD, attend)

    def _through_all(self, hidden_BTD: Tensor, attend: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
        for number in range(len(self._layers)):
            hidden_BTD = self._layer(number, hidden_BTD, attend)
        return hidden_BTD if self.model.final_norm is None else self.model.final_norm(hidden_BTD)

    def _layer(self, number: int, hidden_BTD: Tensor, attend: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
        """The model's layer without dropout; `attend` also puts its keys and values where they are kept."""
        layer, linear, pre = self._layers[number], self.linear, self.model.config.norm == "pre"
        prepared_BTD = layer.attention_norm(hidden_BTD) if pre else hidden_BTD
        query_BTX, key_value_BTX = (
            linear(prepared_BTD, layer.query.weight),
            linear(prepared_BTD, layer.key_value.weight),
        )
        mixed_BTX = attend(number, query_BTX, key_value_BTX)
        hidden_BTD = hidden_BTD + linear(mixed_BTX, layer.attention_output.weight)
        if not pre:
            hidden_BTD = layer.attention_norm(hidden_BTD)
        asking_BTD = layer.feed_forward_norm(hidden_BTD) if pre else hidden_BTD
        inner_BTF = linear(asking_BTD, layer.inner.weight, layer.inner.bias).relu_()
        hidden_BTD = hidden_BTD + linear(inner_BTF, layer.outer.weight, layer.outer.bias)
        return hidden_BTD if pre else layer.feed_forward_norm(hidden_BTD)

    def _visible_distance(self) -> int | None:
        if self.model.config.same_length:
            return replace(self.model.config, memory=self.memory).visible_distance
        return self.memory if self.sight == "last" else None

    def _make_room(self, tokens: int) -> None:
        """Moves the memory to the front of its buffer when the tokens would not fit behind it; longer ones get a longer buffer."""
        W = self._keys[0].shape[2]
        if self._end + tokens <= W:
            return
        for buffers in (self._keys, self._values):
            for number, buffer in enumerate(buffers):
                kept = self._remembered(buffer).clone()
                if self.memory + tokens > W:
                    B, H, _, K = buffer.shape
                    self._spare = []
                    buffers[number] = buffer = buffer.new_zeros(B, H, room(self.memory) + tokens, K)
                buffer[:, :, : self.memory] = kept
        self._end = self.memory
        self._table = None

    def _distances_of(self, layer: int, length: int) -> Distances:
        """The projected relative keys of the `length` nearest distances: the end of a table that is made once and grows rarely."""
        known = self._distances[0].relative_key_HSK if self._distances else None
        if known is None or known.shape[1] < length:
            self._distances = self.model.encoding.distances(max(length, self.memory + self.chunk))
        return self._distances[layer].nearest(length)

    def _known_layers(self, distances: int) -> native.Layers:
        """What the kernels read, for this many distances: made anew only when something moved."""
        farthest = self.model.encoding.farthest
        distances = distances if farthest is None else min(distances, farthest + 1)
        if self._panels is None or self._panels.distances < distances:
            self._panels = Panels.of(self.model, distances)
            self._table = None
        if self._table is None:
            self._table = self._make_table(self._panels)
        return self._table

    def _make_table(self, panels: Panels) -> native.Layers:
        config, stored = self.model.config, self.linear.stored
        matrices, others = [], []
        for number, layer in enumerate(self._layers):
            linears = {"query": layer.query, "key_value": layer.key_value, "output": layer.attention_output}
            linears |= {"inner": layer.inner, "outer": layer.outer}
            matrices.append({name: stored(linear.weight) for name, linear in linears.items()})
            parts: dict[str, Tensor | None] = {"inner_bias": layer.inner.bias, "outer_bias": layer.outer.bias}
            for name, norm in (("attention_norm", layer.attention_norm), ("feed_norm", layer.feed_forward_norm)):
                parts |= {name: norm.weight, f"{name}_bias": norm.bias}
            parts |= {"keys": self._keys[number], "values": self._values[number]}
            others.append(parts | panels.layers[number])
        end = self.model.final_norm
        layers = native.Layers(
            matrices,
            others,
            norm=(None, None) if end is None else (end.weight, end.bias),
            eps=config.norm_eps,
            dtype=self._keys[0].dtype,
            distances=panels.distances,
            pre_norm=config.norm == "pre",
            lanes=self.lanes,
            heads=config.n_head,
            width=config.d_head,
            model=config.d_model,
            inner=config.d_inner,
            room=self._keys[0].shape[2],
        )
        if self.writes:
            words = self.model.vocabulary
            output_VD = (words.tables if config.tie_embeddings else words.output_tables)[0]
            layers.take_words(words.tables[0], stored(output_VD), words.bias_V, scale=config.embedding_scale)
        return layers
