"""Reads text with a trained model and computes nothing twice: keys, values and projected relative keys are kept, where training must make
them anew from hidden states (there the weights change).

    positions   . . . m m m m m | 0 1 2 . . .        one buffer per layer; `end` moves right as tokens come,
                      ^ end-M   ^ end      ^ room    and the last M are moved to the front when room runs out

Exact: the same numbers as the model's own forward with memory M, under either rule of sight.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.files import atomic_file
from transformer_xl.model import TransformerXL
from transformer_xl.model.attention import hidden_keys
from transformer_xl.model.encodings import Distances
from transformer_xl.model.protocol import check_tokens
from transformer_xl.model.transformer import Layer

Sight = Literal["last", "segment"]
"""What a token sees. last: itself and the M before it, however the text is cut. segment: the paper's rule, the M before its segment and all of it before
the token. A model with `same_length` keeps its own."""
CHUNK = 128
"""Longer texts are read in pieces of this many tokens under the rule `last`, where it makes no difference."""
ROOM = 1024
"""Positions of a buffer beyond its memory: so many tokens pass between two moves."""


def kept_bytes(config: ModelConfig, *, lanes: int) -> int:
    """What the keys and values of an engine take in float32."""
    return lanes * config.n_layer * 2 * (config.memory + ROOM) * config.n_head * config.d_head * 4


class Engine:
    def __init__(
        self, model: TransformerXL, *, lanes: int = 1, memory: int | None = None, sight: Sight = "last"
    ) -> None:
        config = model.config
        self.memory = config.memory if memory is None else memory
        if lanes < 1 or self.memory < 0:
            raise InputError(
                f"an engine of {lanes} lanes and memory {self.memory} cannot be; give at least 1 lane and memory 0 or more"
            )
        if config.encoding in ("absolute", "per_layer"):
            raise InputError(
                f"encoding {config.encoding} has no memory to keep; read its text in whole windows instead"
            )
        self.model = model
        self.sight = sight
        self.valid_B = torch.zeros(lanes, dtype=torch.int64)
        """How many kept positions of each lane are real."""
        self.read_B = torch.zeros(lanes, dtype=torch.int64)
        """How many tokens each lane has read since it started."""
        self.last_hidden_BD: Tensor | None = None
        """What the next token will be predicted from."""
        self._layers = cast(list[Layer], list(model.layers))
        self._end = self.memory
        like = model.vocabulary.bias_V
        shape = (lanes, config.n_head, self.memory + ROOM, config.d_head)
        self._keys = [like.new_zeros(shape) for _ in range(config.n_layer)]
        self._values = [like.new_zeros(shape) for _ in range(config.n_layer)]
        self._distances: list[Distances] = []
        self.reset(range(lanes))

    @property
    def lanes(self) -> int:
        return len(self.valid_B)

    @torch.inference_mode()
    def read(self, tokens_BT: Tensor) -> Tensor:
        """The last layer's output for the next tokens of every lane, [B, T, D]. Under the rule `segment` the tokens are one segment."""
        check_tokens(tokens_BT, vocabulary=self.model.config.vocabulary)
        if self.model.training:
            raise InputError(
                "the model is in training mode, where dropout is on; call model.eval() before reading with it"
            )
        if tokens_BT.shape[0] != self.lanes:
            raise InputError(f"tokens for {tokens_BT.shape[0]} lanes, where the engine has {self.lanes}")
        step = tokens_BT.shape[1] if self.sight == "segment" and not self.model.config.same_length else CHUNK
        parts = [self._read(tokens_BT[:, start : start + step]) for start in range(0, tokens_BT.shape[1], step)]
        hidden_BTD = torch.cat(parts, dim=1)
        self.last_hidden_BD = hidden_BTD[:, -1]
        return hidden_BTD

    @torch.inference_mode()
    def feed(self, tokens_BT: Tensor) -> Tensor:
        """Reads the tokens; log-probabilities of the one after them, [B, V]."""
        return self.model.log_probabilities(self.read(tokens_BT)[:, -1])

    @torch.inference_mode()
    def score(self, tokens_BT: Tensor) -> Tensor:
        """Reads the tokens; the loss of each in nats given all before it, [B, T]. NaN for the first of a lane that has read nothing."""
        before_BD, unread_B = self.last_hidden_BD, self.read_B == 0
        hidden_BTD = self.read(tokens_BT)
        if before_BD is None:
            before_BD = torch.zeros_like(hidden_BTD[:, 0])
        loss_BT = self.model.vocabulary.loss(torch.cat([before_BD[:, None], hidden_BTD[:, :-1]], dim=1), tokens_BT)
        loss_BT[unread_B.to(loss_BT.device), 0] = float("nan")
        return loss_BT

    @torch.inference_mode()
    def reset(self, lanes: Iterable[int]) -> None:
        """These lanes start anew: with nothing, or with the zero vectors that the model's convention attends to."""
        chosen = list(lanes)
        self._check(chosen)
        self.read_B[chosen] = 0
        zeros = self.model.config.initial_memory == "zeros"
        self.valid_B[chosen] = self.memory if zeros else 0
        for number, layer in enumerate(self._layers if zeros else ()):
            key_BHSK, value_BHSK = layer.keys_and_values(
                layer.prepared(self._keys[0].new_zeros(1, 1, self.model.config.d_model))
            )
            self._keys[number][chosen, :, self._end - self.memory : self._end] = key_BHSK
            self._values[number][chosen, :, self._end - self.memory : self._end] = value_BHSK

    def select(self, lanes: Iterable[int]) -> "Engine":
        """A new engine with these lanes, in this order; a lane named twice is forked. The weights are shared, the memory is not."""
        chosen = list(lanes)
        self._check(chosen)
        other = copy(self)
        other._keys = [keys[chosen] for keys in self._keys]
        other._values = [values[chosen] for values in self._values]
        other.valid_B, other.read_B = self.valid_B[chosen], self.read_B[chosen]
        other.last_hidden_BD = None if self.last_hidden_BD is None else self.last_hidden_BD[chosen]
        return other

    def fork(self) -> "Engine":
        return self.select(range(self.lanes))

    def save(self, path: Path | str) -> None:
        """Everything the engine remembers, as safetensors; `restore` reads it into an engine of the same model."""
        begin = self._end - self.memory
        tensors = {"valid": self.valid_B, "read": self.read_B}
        for number, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            tensors[f"keys.{number}"] = keys[:, :, begin : self._end].contiguous()
            tensors[f"values.{number}"] = values[:, :, begin : self._end].contiguous()
        if self.last_hidden_BD is not None:
            tensors["last_hidden"] = self.last_hidden_BD.contiguous()
        with atomic_file(path) as file:
            file.write(save_tensors(tensors, {"sight": self.sight}))

    @classmethod
    def restore(cls, model: TransformerXL, path: Path | str, *, sight: Sight = "last") -> "Engine":
        try:
            tensors = load_tensors(Path(path).read_bytes())
            lanes, heads, memory, width = tensors["keys.0"].shape
            shape = (model.config.n_layer, model.config.n_head, model.config.d_head)
            if (len([name for name in tensors if name.startswith("keys.")]), heads, width) != shape:
                raise CheckpointError(f"{path} is the memory of another model; restore it with the model that saved it")
            engine = cls(model, lanes=lanes, memory=memory, sight=sight)
            for number in range(model.config.n_layer):
                engine._keys[number][:, :, :memory] = tensors[f"keys.{number}"]
                engine._values[number][:, :, :memory] = tensors[f"values.{number}"]
            engine.valid_B, engine.read_B = tensors["valid"], tensors["read"]
            engine.last_hidden_BD = tensors.get("last_hidden")
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; save an engine there first") from None
        except (SafetensorError, KeyError, ValueError, RuntimeError):
            raise CheckpointError(f"{path} is not a saved engine, or is damaged; save it again") from None
        return engine

    # --- inside

    def _read(self, tokens_BT: Tensor) -> Tensor:
        model, T = self.model, tokens_BT.shape[1]
        self._make_room(T)
        M = self._kept()
        S = M + T
        limit = self._visible_distance()
        valid_B = None if bool((self.valid_B >= M).all()) else self.valid_B.clamp(max=M)
        hidden_BTS = hidden_keys(memory=M, segment=T, valid_B=valid_B, visible_distance=limit, device=tokens_BT.device)
        hidden_BTD = model.encoding.enter_first(model.vocabulary.embed(tokens_BT))
        begin, end = self._end - M, self._end + T
        for number, layer in enumerate(self._layers):
            prepared_BTD = layer.prepared(hidden_BTD)
            key_BHTK, value_BHTK = layer.keys_and_values(prepared_BTD)
            self._keys[number][:, :, self._end : end] = key_BHTK
            self._values[number][:, :, self._end : end] = value_BHTK
            keys_BHSK, values_BHSK = self._keys[number][:, :, begin:end], self._values[number][:, :, begin:end]
            hidden_BTD = layer.answer(
                hidden_BTD,
                prepared_BTD,
                keys_BHSK,
                values_BHSK,
                self._distances_of(number, S),
                hidden_BTS,
                model.attend,
            )
        if model.final_norm is not None:
            hidden_BTD = model.final_norm(hidden_BTD)
        self._end = end
        self.valid_B = (self.valid_B + T).clamp(max=self.memory)
        self.read_B = self.read_B + T
        return hidden_BTD

    def _visible_distance(self) -> int | None:
        if self.model.config.same_length:
            return replace(self.model.config, memory=self.memory).visible_distance
        return self.memory if self.sight == "last" else None

    def _kept(self) -> int:
        """How far back any lane has something real: a young engine looks at no empty room."""
        return min(self.memory, int(self.valid_B.max()))

    def _make_room(self, tokens: int) -> None:
        """Moves the memory to the front of its buffer when the tokens would not fit behind it; longer ones get a longer buffer."""
        W = self._keys[0].shape[2]
        if self._end + tokens <= W:
            return
        for buffers in (self._keys, self._values):
            for number, buffer in enumerate(buffers):
                kept = buffer[:, :, self._end - self.memory : self._end].clone()
                if self.memory + tokens > W:
                    B, H, _, K = buffer.shape
                    buffers[number] = buffer = buffer.new_zeros(B, H, self.memory + tokens + ROOM, K)
                buffer[:, :, : self.memory] = kept
        self._end = self.memory

    def _distances_of(self, layer: int, length: int) -> Distances:
        """The projected relative keys of the `length` nearest distances: the end of a table that is made once and grows rarely."""
        known = self._distances[0].relative_key_HSK if self._distances else None
        if known is None or known.shape[1] < length:
            self._distances = self.model.encoding.distances(max(length, self.memory + CHUNK))
        table = self._distances[layer]
        key_HSK, bias_HS = table.relative_key_HSK, table.distance_bias_HS
        return replace(
            table,
            relative_key_HSK=None if key_HSK is None else key_HSK[:, key_HSK.shape[1] - length :],
            distance_bias_HS=None if bias_HS is None else bias_HS[:, bias_HS.shape[1] - length :],
        )

    def _check(self, lanes: list[int]) -> None:
        for lane in lanes:
            if not 0 <= lane < self.lanes:
                raise InputError(f"lane {lane} does not exist; this engine has lanes 0 to {self.lanes - 1}")
