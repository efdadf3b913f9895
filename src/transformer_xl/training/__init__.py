"""How a model learns."""

from transformer_xl.training.loop import Outcome, train

__all__ = ["Outcome", "train"]
