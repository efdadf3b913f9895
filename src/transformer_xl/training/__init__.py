"""How a model learns."""

from transformer_xl.training.loop import Outcome, train, train_unstuck
from transformer_xl.training.reporting import OnStep, Step

__all__ = ["OnStep", "Outcome", "Step", "train", "train_unstuck"]
