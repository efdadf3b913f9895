"""What each kernel can compute: an allow-list over every field of a configuration.

A field that nobody has declared here is one that no kernel knows, and a model that has it is computed by torch: a fast path may be absent, never
wrong. (Once training squared its ReLU and the kernel that scored did not.) A test asks for a declaration of every field.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Literal

from transformer_xl.config import ModelConfig

Kernel = Literal["attention", "tiles", "layers", "words", "portable"]
"""attention: of a segment over itself and its memory, with gradients. tiles: the same on an NVIDIA card. layers: a token through all layers, with kept keys and values. words: the draw of
the next one after that. portable: tokens to whole numbers in the same bits on every machine."""
Allowed = Callable[[ModelConfig], bool]
WIDEST = 128
"""Heads that a card's registers hold."""


def _any(config: ModelConfig) -> bool:
    return True


def _among(name: str, *values: object) -> dict[str, Allowed]:
    return {name: lambda config: getattr(config, name) in values}


EVERY: dict[str, Allowed] = dict.fromkeys(
    (
        # Sizes, lengths and constants, which are handed to a kernel with the tensors.
        *(
            "d_model",
            "n_layer",
            "n_head",
            "d_head",
            "d_inner",
            "norm_eps",
            "memory",
            "same_length",
            "same_length_keys",
            "clamp_len",
            "neighbours",
        ),
        *("ngrams", "ngram_rows", "d_ngram"),
        # What becomes of distances before a kernel is told of them.
        *("learned_positions", "frequencies", "share_biases"),
        # Words on their way in and out.
        *("vocabulary", "d_embed", "cutoffs", "div_val", "projections", "tie_embeddings", "tie_projections"),
        # How weights start.
        *("init_std", "projection_init_std"),
        # Training only. Of dropout, attention's own is handed to its kernel; a mask that is held over time is refused by `backend_of`.
        *("auxiliary_layers", "auxiliary_targets", "word_dropout", "dropout", "attention_dropout", "locked_dropout"),
        *(
            "embedding_dropout",
            "position_dropout",
            "attention_output_dropout",
            "inner_dropout",
            "feed_forward_dropout",
            "output_dropout",
        ),
    ),
    _any,
)
ATTENTION = (
    EVERY | _among("encoding", "relative", "shaw") | dict.fromkeys(("initial_memory", "norm", "final_norm"), _any)
)
TILES = ATTENTION | {"d_head": lambda config: config.d_head <= WIDEST}
LAYERS = (
    EVERY
    | _among("encoding", "relative", "shaw", "shaw_biased")
    | _among("norm", "post", "pre")
    | dict.fromkeys(("initial_memory", "final_norm"), _any)
)
WORDS = LAYERS | _among("cutoffs", ()) | {"projections": lambda config: not config.has_projection(0)}
PORTABLE = WORDS | _among("encoding", "relative") | _among("initial_memory", "empty")
KERNELS: Mapping[Kernel, Mapping[str, Allowed]] = {
    "attention": ATTENTION,
    "tiles": TILES,
    "layers": LAYERS,
    "words": WORDS,
    "portable": PORTABLE,
}


def unsupported(kernel: Kernel, config: ModelConfig) -> list[str]:
    """The fields that keep a model from a kernel."""
    allowed = KERNELS[kernel]
    return [field.name for field in fields(config) if field.name not in allowed or not allowed[field.name](config)]


@lru_cache(maxsize=256)
def supports(kernel: Kernel, config: ModelConfig) -> bool:
    return not unsupported(kernel, config)
