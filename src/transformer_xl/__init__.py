"""Transformer-XL: language models whose memory reaches beyond any fixed context.

Importing this does nothing but make names known; torch comes with the first one that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer_xl.config import EvaluationConfig, ModelConfig, RecurrentConfig, RunConfig, TrainingConfig
    from transformer_xl.errors import TransformerXLError
    from transformer_xl.library import Loaded, from_pretrained, load
    from transformer_xl.model import Memory, Output, TransformerXL
    from transformer_xl.presets import find_preset

    __version__: str

_HOMES = {
    **dict.fromkeys(("EvaluationConfig", "ModelConfig", "RecurrentConfig", "RunConfig", "TrainingConfig"), "config"),
    "TransformerXLError": "errors",
    **dict.fromkeys(("Loaded", "from_pretrained", "load"), "library"),
    **dict.fromkeys(("Memory", "Output", "TransformerXL"), "model"),
    "find_preset": "presets",
}

__all__ = [
    "EvaluationConfig",
    "Loaded",
    "Memory",
    "ModelConfig",
    "Output",
    "RecurrentConfig",
    "RunConfig",
    "TrainingConfig",
    "TransformerXL",
    "TransformerXLError",
    "find_preset",
    "from_pretrained",
    "load",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("transformer-xl")
    if name in _HOMES:
        return getattr(import_module(f"transformer_xl.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'transformer_xl' has no attribute {name!r}")
