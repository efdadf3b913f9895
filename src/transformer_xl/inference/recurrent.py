"""The same engine for a recurrent model: its state is all there is to keep, and nothing of it grows."""

from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from transformer_xl import native
from transformer_xl.errors import InputError
from transformer_xl.inference.reader import Reader, joined_last_hidden
from transformer_xl.inference.saved import SAVED, saved_lanes, saved_tensors
from transformer_xl.inference.weights import Linear
from transformer_xl.model import Recurrent, RecurrentState
from transformer_xl.tensor_files import Kind, kinds_of, reading, write_tensors


class RecurrentEngine(Reader):
    model: Recurrent

    def __init__(self, model: Recurrent, *, lanes: int = 1) -> None:
        if lanes < 1:
            raise InputError(f"an engine of {lanes} lanes cannot be; give at least 1")
        self.model = model
        self.linear = Linear("exact", compiled=native.usable(model.vocabulary.bias_V))
        self.state = model.start_memory(lanes)
        self.read_B = torch.zeros(lanes, dtype=torch.int64)
        self.last_hidden_BD = None

    @torch.inference_mode()
    def read(self, tokens_BT: Tensor) -> Tensor:
        self._check_reading(tokens_BT)
        parts = []
        for start in range(0, tokens_BT.shape[1], self.chunk):
            output = self.model(tokens_BT[:, start : start + self.chunk], memory=self.state)
            self.state = output.memory
            parts.append(output.hidden_BTD)
        hidden_BTD = torch.cat(parts, dim=1)
        self.read_B = self.read_B + tokens_BT.shape[1]
        self.last_hidden_BD = hidden_BTD[:, -1]
        return hidden_BTD

    @torch.inference_mode()
    def reset(self, lanes: Iterable[int]) -> None:
        chosen = list(lanes)
        self._check_lanes(chosen)
        self.state, self.read_B = self.state.reset(chosen), self.read_B.index_fill(0, torch.tensor(chosen), 0)

    @torch.inference_mode()
    def select(self, lanes: Iterable[int]) -> "RecurrentEngine":
        chosen = list(lanes)
        self._check_lanes(chosen)
        other = copy(self)
        other.state, other.read_B = self.state.select(chosen), self.read_B[chosen]
        other.last_hidden_BD = None if self.last_hidden_BD is None else self.last_hidden_BD[chosen]
        return other

    @classmethod
    @torch.inference_mode()
    def joined(cls, engines: Sequence["RecurrentEngine"]) -> "RecurrentEngine":
        other = copy(engines[0])
        if any(engine.model is not other.model for engine in engines):
            raise InputError("engines of several models cannot be joined; select or fork them from one")
        parts = zip(*(engine.state.layers for engine in engines), strict=True)
        other.state = RecurrentState(layers=tuple(torch.cat(part) for part in parts))
        other.read_B = torch.cat([engine.read_B for engine in engines])
        other.last_hidden_BD = joined_last_hidden(engines)
        return other

    def save(self, path: Path | str) -> None:
        tensors = {**_named(self.state), "read": self.read_B}
        if self.last_hidden_BD is not None:
            tensors["last_hidden"] = self.last_hidden_BD.contiguous()
        write_tensors(path, tensors)

    @classmethod
    def restore(cls, model: Recurrent, path: Path | str, *, lanes: int | None = None) -> "RecurrentEngine":
        with reading(path, what=SAVED) as file:
            lanes = saved_lanes(file, asked=lanes)
            file.check_metadata(())
            one = kinds_of(_named(model.start_memory(1)))
            wanted = {name: Kind(kind.dtype, (lanes, *kind.shape[1:])) for name, kind in one.items()}
            tensors = saved_tensors(file, wanted, model=model, lanes=lanes)
        engine = cls(model, lanes=lanes)
        engine.state = RecurrentState(layers=tuple(tensors[name] for name in wanted))
        engine.read_B, engine.last_hidden_BD = tensors["read"], tensors.get("last_hidden")
        return engine


def _named(state: RecurrentState) -> dict[str, Tensor]:
    return {f"state.{name}": part for name, part in state.tensors().items()}
