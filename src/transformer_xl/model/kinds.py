"""The one place that turns a configuration into a model of its kind."""

import torch

from transformer_xl.config import ModelConfig, RecurrentConfig
from transformer_xl.model.memory import Memory
from transformer_xl.model.recurrent import Recurrent, RecurrentState
from transformer_xl.model.transformer import TransformerXL

AnyModel = TransformerXL | Recurrent
AnyMemory = Memory | RecurrentState


def build_model(config: ModelConfig | RecurrentConfig) -> AnyModel:
    return Recurrent(config) if isinstance(config, RecurrentConfig) else TransformerXL(config)


def parameter_count(config: ModelConfig | RecurrentConfig) -> int:
    """How many numbers are learned. Built on the meta device: no memory, no time."""
    with torch.device("meta"):
        model = build_model(config)
    return sum(parameter.numel() for parameter in model.parameters())
