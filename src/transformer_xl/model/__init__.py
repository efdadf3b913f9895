"""The mathematics: tokens, targets and memory in; losses in token order and new memory out. Knows no text."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch

from transformer_xl.config import ModelConfig, RecurrentConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.memory import Memory
from transformer_xl.model.protocol import LanguageModel, Output
from transformer_xl.model.recurrent import Recurrent, RecurrentState
from transformer_xl.model.transformer import TransformerXL

__all__ = [
    "AnyMemory",
    "AnyModel",
    "LanguageModel",
    "Memory",
    "Output",
    "Recurrent",
    "RecurrentState",
    "TransformerXL",
    "build_model",
    "build_shapes",
    "parameter_count",
    "reading_in",
    "twin",
]

AnyModel = TransformerXL | Recurrent
AnyMemory = Memory | RecurrentState


def build_model(config: ModelConfig | RecurrentConfig) -> AnyModel:
    return Recurrent(config) if isinstance(config, RecurrentConfig) else TransformerXL(config)


def build_shapes(config: ModelConfig | RecurrentConfig) -> AnyModel:
    """The model on the meta device, where it has shapes and no numbers: no memory, no time."""
    try:
        with torch.device("meta"):
            return build_model(config)
    except RuntimeError:  # sizes whose product is no size
        sizes = {name: value for name, value in asdict(config).items() if type(value) is int}
        name = max(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"model.{name}: {sizes[name]:,} asks for tensors larger than any can be; make it smaller"
        ) from None


def parameter_count(config: ModelConfig | RecurrentConfig) -> int:
    """How many numbers are learned."""
    return sum(parameter.numel() for parameter in build_shapes(config).parameters())


@contextmanager
def reading_in(model: AnyModel, half: torch.dtype | None) -> Iterator[None]:
    """The model, whose readers compute products in `half`; as it was, afterwards."""
    before, model.reads_in = model.reads_in, half
    try:
        yield
    finally:
        model.reads_in = before


def twin(model: AnyModel) -> AnyModel:
    """The same weights in another object: for who changes how long a memory is, or how it attends, while somebody else reads with the model."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
