"""How a model learns."""

from transformer_xl.training.loop import OnStep, Outcome, Step, train, train_unstuck

__all__ = ["OnStep", "Outcome", "Step", "train", "train_unstuck"]
