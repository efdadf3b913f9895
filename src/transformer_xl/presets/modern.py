"""Beyond the paper: its memory and its relative encoding, with what has since been shown to help, and that beat its configuration here in the same time.

docs/experiments.md has the comparison, and what was tried and left out: for words nothing was found that wins.
"""

from dataclasses import replace

from transformer_xl.presets.preset import Preset, sized
from transformer_xl.presets.small import TINY_BYTE

MODERN: tuple[Preset, ...] = (
    Preset(
        name="modern-byte",
        corpus="enwik8",
        provenance="own",
        note="tiny-byte with what came after the paper: pre-norm and Muon; docs/experiments.md compares them",
        run=replace(
            sized(TINY_BYTE, norm="pre", final_norm=True),
            training=replace(
                TINY_BYTE.training,
                optimiser="muon",
                learning_rate=1e-2,
                steps=2000,
                validate_every=1000,
                save_every=1000,
            ),
        ),
    ),
)
