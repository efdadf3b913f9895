"""Text out of a model."""

from transformer_xl.generation.beam import Hypothesis, beam_search
from transformer_xl.generation.generate import Batch, Written, generate, start_batch, write_texts
from transformer_xl.generation.sampling import Sampler, Sampling
from transformer_xl.generation.text import TextStream, start_tokens, text_pieces

__all__ = [
    "Batch",
    "Hypothesis",
    "Sampler",
    "Sampling",
    "TextStream",
    "Written",
    "beam_search",
    "generate",
    "start_batch",
    "start_tokens",
    "text_pieces",
    "write_texts",
]
