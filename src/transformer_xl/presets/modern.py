"""Beyond the paper: its memory and its relative encoding, with what has since been shown to help, and that beat its configuration here in the same time.

Each is a small model with LayerNorm before its parts instead of after them, and with its matrices moved by Muon. docs/experiments.md has the comparison, and what
was tried and left out.
"""

from dataclasses import replace

from transformer_xl.config import RunConfig
from transformer_xl.presets.preset import Preset, sized
from transformer_xl.presets.small import TINY_BYTE, TINY_WORD


def _modern(run: RunConfig, **training: object) -> RunConfig:
    moved = replace(run.training, optimiser="muon", **training)  # type: ignore[arg-type]
    return replace(sized(run, norm="pre", final_norm=True), training=moved)


MODERN: tuple[Preset, ...] = (
    Preset(
        name="modern-byte",
        corpus="enwik8",
        provenance="own",
        note="tiny-byte with what came after the paper: pre-norm and Muon; docs/experiments.md compares them",
        run=_modern(TINY_BYTE, learning_rate=1e-2, steps=2100, validate_every=1050, save_every=1050),
    ),
    Preset(
        name="modern-word",
        corpus="ptb",
        provenance="own",
        note="tiny-word with Muon and more lanes; docs/experiments.md compares them",
        run=_modern(
            TINY_WORD,
            lanes=24,
            learning_rate=1e-2,
            embedding_rate_factor=2.0,
            warm_up=100,
            steps=3000,
            validate_every=600,
            save_every=600,
        ),
    ),
)
