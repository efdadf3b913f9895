"""Beyond the paper: its memory and its relative encoding, with what has since been shown to help, and that beat its configuration here in the same time.

docs/experiments.md has the comparison, what was tried and left out, and how long the gain lasts.
"""

from dataclasses import replace

from transformer_xl.config import RunConfig
from transformer_xl.presets.preset import Preset, sized
from transformer_xl.presets.small import TINY_BYTE, TINY_WORD


def _modern(run: RunConfig, **training: object) -> RunConfig:
    """Pre-norm with a final norm, and Muon: its rate serves both corpora."""
    run = sized(run, norm="pre", final_norm=True)
    return replace(run, training=replace(run.training, optimiser="muon", learning_rate=1e-2, warm_up=100, **training))  # type: ignore[arg-type]


MODERN: tuple[Preset, ...] = (
    Preset(
        name="modern-byte",
        corpus="enwik8",
        provenance="own",
        note="tiny-byte with what came after the paper: pre-norm and Muon; docs/experiments.md compares them",
        run=_modern(TINY_BYTE, steps=2000, validate_every=1000, save_every=1000),
    ),
    Preset(
        name="modern-word",
        corpus="ptb",
        provenance="own",
        note="words in four minutes on two cores, tiny-word's sizes with pre-norm and Muon; docs/experiments.md compares them",
        run=_modern(
            sized(TINY_WORD, dropout=0.0, embedding_dropout=0.0, init_std=0.02),
            lanes=24,
            steps=745,
            embedding_rate_factor=2.0,
            weight_decay=0.1,
            validate_every=0,
            save_every=0,
        ),
    ),
)
