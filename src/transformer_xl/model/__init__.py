"""The mathematics: tokens, targets and memory in; losses in token order and new memory out. Knows no text."""

from transformer_xl.model.memory import Memory
from transformer_xl.model.protocol import NOT_A_TARGET, LanguageModel, Output
from transformer_xl.model.transformer import TransformerXL, parameter_count

__all__ = ["NOT_A_TARGET", "LanguageModel", "Memory", "Output", "TransformerXL", "parameter_count"]
