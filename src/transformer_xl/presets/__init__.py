"""Every model of the paper as data: sizes, training and evaluation lengths, the paper's own figure, and where each number comes from.

A variant is a difference from another. "script": read from the authors' released script. "author": told by an author. "derived": chosen to fit
the parameter count the paper states, where the authors published nothing more. "own": not in the paper; small models for two CPU cores.
"""

from transformer_xl.errors import ConfigError, suggest
from transformer_xl.presets.modern import MODERN
from transformer_xl.presets.paper import PAPER
from transformer_xl.presets.preset import Preset
from transformer_xl.presets.small import SMALL

__all__ = ["PRESETS", "Preset", "find_preset"]

PRESETS: tuple[Preset, ...] = (*PAPER, *SMALL, *MODERN)


def find_preset(name: str) -> Preset:
    """By its name, or one it had; its configuration is `.run`."""
    for preset in PRESETS:
        if name in (preset.name, *preset.aliases):
            return preset
    known = [known for preset in PRESETS for known in (preset.name, *preset.aliases)]
    raise ConfigError(f"no preset {name}{suggest(name, known)}")
