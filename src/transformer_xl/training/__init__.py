"""How a model learns."""

from transformer_xl.training.loop import Outcome, train, train_unstuck

__all__ = ["Outcome", "train", "train_unstuck"]
