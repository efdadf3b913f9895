"""Text out of a model."""

from transformer_xl.generation.generate import Sampling, generate, pick, start_tokens, text_pieces

__all__ = ["Sampling", "generate", "pick", "start_tokens", "text_pieces"]
