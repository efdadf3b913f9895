"""The same for a recurrent model: its state is all there is to keep, and nothing of it grows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl import native
from transformer_xl.inference.reader import Reader
from transformer_xl.inference.weights import Linear
from transformer_xl.model import AnyMemory, Recurrent, RecurrentState
from transformer_xl.tensor_files import Kind, TensorFile, kinds_of

PREFIX = "state."


class States:
    """The state of every lane, as a reader keeps it."""

    def __init__(self, state: RecurrentState) -> None:
        self.state = state

    def select(self, lanes: list[int]) -> "States":
        return States(self.state.select(lanes))

    def grown(self, others: Sequence["States"]) -> "States":
        parts = zip(self.state.layers, *(other.state.layers for other in others), strict=True)
        return States(RecurrentState(layers=tuple(torch.cat(part) for part in parts)))

    reordered = select

    def tensors(self) -> dict[str, Tensor]:
        return {f"{PREFIX}{name}": part for name, part in self.state.tensors().items()}


class RecurrentEngine(Reader):
    model: Recurrent
    kept: States

    def __init__(self, model: Recurrent, *, lanes: int = 1) -> None:
        super().__init__(model, lanes=lanes, kept=lambda: States(model.start_memory(lanes)))
        self.linear = Linear("exact", compiled=native.usable(model.vocabulary.bias_V))

    def _read(self, tokens_BT: Tensor) -> Tensor:
        output = self.model(tokens_BT, memory=self.kept.state)
        self.kept = States(output.memory)
        hidden_BTD: Tensor = output.hidden_BTD
        return hidden_BTD

    def remember(self, memory: AnyMemory) -> None:
        assert isinstance(memory, RecurrentState), "what another kind of model remembers"
        self.model.check_memory(memory, lanes=self.lanes)
        self.kept = States(memory)

    def _reset(self, lanes: list[int]) -> None:
        self.kept = States(self.kept.state.reset(lanes))

    @classmethod
    def checked_kinds(cls, file: TensorFile, model: Any, *, lanes: int, **how: Any) -> dict[str, Kind]:
        file.check_metadata(())
        one = kinds_of(States(model.start_memory(1)).tensors())
        return {name: Kind(kind.dtype, (lanes, *kind.shape[1:])) for name, kind in one.items()}

    def take(self, path: Path | str, tensors: Mapping[str, Tensor]) -> None:
        self.kept = States(RecurrentState(layers=tuple(tensors[name] for name in self.kept.tensors())))
