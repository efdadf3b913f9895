"""Learning while reading: weights that move after each segment, a cache of what was seen, and both as a value. A token is scored before anything learns from it."""

from transformer_xl.adaptation.reader import AdaptiveReader
from transformer_xl.adaptation.statistics import Statistics

__all__ = ["AdaptiveReader", "Statistics"]
