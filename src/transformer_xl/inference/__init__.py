"""Reading text with a trained model, computing nothing twice."""

from transformer_xl.inference.engine import Engine, Sight

__all__ = ["Engine", "Sight"]
