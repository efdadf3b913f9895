"""The mathematics: tokens, targets and memory in; losses in token order and new memory out. Knows no text."""

from transformer_xl.model.kinds import AnyMemory, AnyModel, build_model, build_shapes, parameter_count
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
]
