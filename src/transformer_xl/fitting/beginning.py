"""What a model of this text begins with, where nobody said: weights drawn by chance, or those of the model in the box, which has read much already.

The model in the box reads a sample of the text. Its bits beside those of xz, which knows nothing beforehand, say how far it knows such text. Of a short
text it need not know much to be the better beginning (docs/experiments.md has what was measured).
"""

import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from transformer_xl.checkpoint import verified_folder
from transformer_xl.checkpoint.box import BOX, box_is_here
from transformer_xl.checkpoint.folder import read_config
from transformer_xl.config import ModelConfig
from transformer_xl.errors import ConfigError, InputError
from transformer_xl.fitting.choosing import largest_within
from transformer_xl.fitting.looking import Findings
from transformer_xl.library import load

NOTHING = "nothing"
"""The word for weights drawn by chance, whatever the model in the box knows; unless a run here has that name."""

KNOWN = ((0, 1.6), (2_000_000, 1.1))
"""(bytes of text, bits of the model in the box for one of xz's): with fewer than so many it is the beginning."""


def check_wish(wish: str | None) -> None:
    """Before anything is read."""
    if wish is None or _is_nothing(wish):
        return
    if not wish:  # it would be the current folder
        raise ConfigError(f"`from={wish}` names no run; give one, {BOX} or {NOTHING}")
    if not isinstance(read_config(verified_folder(wish) / "config.json").model, ModelConfig):
        raise ConfigError(f"{wish} is no Transformer-XL; go on with it by txl prepare and txl train")


def _is_nothing(wish: str) -> bool:
    return wish == NOTHING and not Path(NOTHING).exists()


def begin_with(wish: str | None, findings: Findings, *, device: str) -> tuple[str | None, tuple[str, ...]]:
    """The run to begin with, None for none, and why. `wish`: what was asked for."""
    if wish is not None and _is_nothing(wish):
        return None, ("weights: drawn by chance, as asked for",)
    if wish is not None:
        return wish, (f"weights: it begins with those of {wish}",)
    if not (box_is_here() and findings.is_text and findings.sample) or Path(BOX).exists():  # then the word means that
        return None, ()
    box, compressor = bits_of_the_box(findings.sample, device=device), bits_of_a_compressor(findings.sample)
    told = f"of a sample, the model in the box needs {box:.2f} bits per byte and xz {compressor:.2f}"
    if box < largest_within(KNOWN, findings.bytes) * compressor:
        return BOX, (f"weights: it begins with those of the model in the box: {told}",)
    return None, (f"weights: drawn by chance: {told}",)


def bits_of_the_box(pieces: Sequence[bytes], *, device: str) -> float:
    """Per byte, each piece by itself; infinite where a piece has something that it has no token for."""
    loaded, bits = load(device=device), 0.0
    try:
        for piece in pieces:
            bits += float(np.nansum(loaded.score(piece).bits))
    except InputError:
        return float("inf")
    return bits / sum(map(len, pieces))


def bits_of_a_compressor(pieces: Sequence[bytes]) -> float:
    return 8 * len(lzma.compress(b"".join(pieces), preset=9)) / sum(map(len, pieces))
