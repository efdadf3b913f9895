"""What of ours takes part: the engine, the model's own forward, the vanilla window, and the training step."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from transformer_xl.benchmarks.window import WindowReader
from transformer_xl.benchmarks.worker import Implementation, Segmentwise, Trainer, everything, shifted
from transformer_xl.decoding.distribution import Distribution, best
from transformer_xl.inference import Engine
from transformer_xl.interop.formats import huggingface
from transformer_xl.model import TransformerXL
from transformer_xl.model.reference import reference_attend


def build(name: str, folder: Path, *, lanes: int, top_k: int, segment: int) -> Implementation:
    match name:
        case "forward":
            return Forward(folder, top_k=top_k, segment=segment)
        case "window" | "plain window":
            return Window(folder, plain=name == "plain window")
        case _:
            return Ours(folder, lanes=lanes, top_k=top_k, weights=name)


class Forward(Segmentwise):
    """Our model's own forward, the one that trains: slow, and what the engine must equal."""

    def __init__(self, folder: Path, *, top_k: int, segment: int) -> None:
        super().__init__(top_k=top_k, segment=segment)
        self.model = our_model(folder)
        self.memory: Any = None

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        output = self.model(tokens_BT, memory=self.memory)
        self.memory = output.memory
        return output.hidden_BTD  # type: ignore[no-any-return]

    def log_probabilities(self, hidden_BTD: Tensor) -> Tensor:
        return self.model.log_probabilities(hidden_BTD)


class Ours:
    def __init__(self, folder: Path, *, lanes: int, top_k: int, weights: str) -> None:
        self.top_k, self.lanes = top_k, lanes
        self.model = our_model(folder)
        self.engine = Engine(self.model, weights=weights)  # type: ignore[arg-type]

    def fill(self, tokens_BT: Tensor) -> None:
        self.engine.read(tokens_BT[:1])
        if self.lanes > 1:  # a lane forked costs nothing to fill, and takes as long to go on with as any other
            self.engine = self.engine.select([0] * self.lanes)

    def next(self, tokens_B1: Tensor) -> tuple[Tensor, Tensor]:
        if not self.top_k:
            return everything(self.engine.feed(tokens_B1))
        hidden_BD = self.engine.read(tokens_B1)[:, -1]
        distribution = Distribution(self.engine, hidden_BD, edges=self.model.config.cluster_edges)
        words = distribution.ask([lambda lane: best(lane, self.top_k)] * self.lanes)
        values_BK, ids_BK = np.stack([one.score_K for one in words]), np.stack([one.token_K for one in words])
        return torch.from_numpy(values_BK), torch.from_numpy(ids_BK)

    def score(self, tokens_BT: Tensor) -> Tensor:
        return self.engine.score(tokens_BT)


class Window:
    """The vanilla way: no memory, every token predicted from a window that is read from its beginning."""

    def __init__(self, folder: Path, *, plain: bool) -> None:
        self.model = our_model(folder)
        self.length = self.model.config.memory
        self.text_BT = torch.zeros(1, 0, dtype=torch.int64)
        self.model.set_lengths(same_length=False)
        self.model.set_lengths(memory=0)
        self.reader = None if plain else WindowReader(self.model)

    def fill(self, tokens_BT: Tensor) -> None:
        self.text_BT = tokens_BT[:, -self.length :]

    def next(self, tokens_B1: Tensor) -> tuple[Tensor, Tensor]:
        self.text_BT = torch.cat([self.text_BT, tokens_B1], dim=1)[:, -self.length :]
        if self.reader is None:
            hidden_BD = self.model(self.text_BT).hidden_BTD[:, -1]
        else:
            hidden_BD = self.reader.step(self.text_BT)
        return everything(self.model.log_probabilities(hidden_BD))

    def score(self, tokens_BT: Tensor) -> Tensor:
        raise NotImplementedError


class OurTrainer(Trainer):
    def __init__(self, folder: Path, *, dropout: float, formula: bool) -> None:
        """`formula`: the paper's terms spelled out, and autograd's own gradients."""
        super().__init__(our_model(folder, dropout=dropout))
        if formula:
            self.model.attend = reference_attend
            self.model.vocabulary.table_gradient = lambda tokens_BT: None

    def losses(self, tokens_BT: Tensor) -> Tensor:
        return cast(Tensor, self.model(tokens_BT, targets_BT=shifted(tokens_BT)).loss_BT)[:, :-1]

    def gradients(self) -> dict[str, Tensor]:
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return huggingface.weights_to_huggingface(gradients, self.model.config)

    def step(self, tokens_BT: Tensor) -> None:
        self.model.vocabulary.give_back_gradient()
        super().step(tokens_BT)

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Any]:
        output = self.model(tokens_BT, targets_BT=shifted(tokens_BT), memory=self.memory)
        return output.loss_BT, output.memory


def our_model(folder: Path, *, dropout: float = 0.0) -> TransformerXL:
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = replace(huggingface.config_from_huggingface(told), dropout=dropout)
    model = TransformerXL(config)
    model.load_state_dict(
        huggingface.weights_from_huggingface(load_file(folder / "model.safetensors"), config), strict=True
    )
    return model.eval()
