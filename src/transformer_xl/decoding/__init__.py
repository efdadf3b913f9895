"""Text out of a model."""

from transformer_xl.decoding.beams import Hypothesis, beam_search
from transformer_xl.decoding.sampling import Sampler, Sampling
from transformer_xl.decoding.text import TextStream, start_tokens, text_pieces
from transformer_xl.decoding.writing import Written, generate, start_lanes, write_texts

__all__ = [
    "Hypothesis",
    "Sampler",
    "Sampling",
    "TextStream",
    "Written",
    "beam_search",
    "generate",
    "start_lanes",
    "start_tokens",
    "text_pieces",
    "write_texts",
]
