"""Beyond the paper: its memory and its relative encoding, with what has since been shown to help, and that beat its configuration here in the same time.

docs/experiments.md has the comparison, what was tried and left out, and how long the gain lasts.
"""

from dataclasses import replace

from transformer_xl.config import EvaluationConfig, ModelConfig, RunConfig, TrainingConfig
from transformer_xl.presets.preset import Preset, sized
from transformer_xl.presets.small import TINY_BYTE, TINY_WORD


def _modern(run: RunConfig, **training: object) -> RunConfig:
    """Pre-norm with a final norm, and Muon: its rate serves both corpora."""
    run = sized(run, norm="pre", final_norm=True)
    return replace(run, training=replace(run.training, optimiser="muon", learning_rate=1e-2, warm_up=100, **training))  # type: ignore[arg-type]


BYTES = RunConfig(
    model=ModelConfig(
        vocabulary=256,
        n_layer=2,
        d_model=192,
        n_head=6,
        d_head=32,
        d_inner=768,
        memory=128,
        norm="pre",
        final_norm=True,
        tie_embeddings=False,
        neighbours=4,
        ngrams=(2, 3, 4, 5),
        ngram_rows=1 << 16,
        d_ngram=16,
        init_std=0.02,
    ),
    training=TrainingConfig(
        segment=64,
        stretch=8,
        lanes=32,
        steps=2700,
        optimiser="muon",
        learning_rate=1e-2,
        warm_up=100,
        schedule_rule="tensorflow",
        precision="bfloat16",
        average="ema",
        average_decay=0.99,
        validate_every=900,
        validation_tokens=50_000,
        save_every=500,
        log_every=10,
    ),
    evaluation=EvaluationConfig(segment=64, memory=128),
)

TEXT = replace(
    sized(BYTES, vocabulary=4096, memory=64, ngrams=(), ngram_rows=0, d_ngram=0),
    evaluation=EvaluationConfig(segment=64, memory=64),
)

BOX = replace(
    sized(
        TEXT,
        n_layer=4,
        d_model=320,
        n_head=5,
        d_head=64,
        d_inner=1280,
        memory=128,
        ngrams=(2, 3),
        ngram_rows=1 << 15,
        d_ngram=16,
    ),
    training=replace(
        TEXT.training,
        segment=128,
        minutes=105.0,
        steps=6500,
        weight_decay=0.05,
        validate_every=1000,
        validation_tokens=100_000,
        save_every=1000,
    ),
    evaluation=EvaluationConfig(segment=128, memory=128),
)

MODERN: tuple[Preset, ...] = (
    Preset(
        name="bytes",
        aliases=("demo",),
        purpose="bytes of any text, in minutes; what txl demo trains",
        corpus="python",
        provenance="own",
        note="memory and relative encoding as in the paper, with neighbours, runs of tokens, stretches and Muon; docs/experiments.md has its figures",
        run=BYTES,
    ),
    Preset(
        name="text",
        purpose="byte pairs of UTF-8 text, in minutes; what txl fit begins with",
        corpus="own text",
        provenance="own",
        note="bytes for text in pairs: several bytes are read in one step; docs/experiments.md has its figures",
        run=TEXT,
    ),
    Preset(
        name="box",
        corpus="own text",
        provenance="own",
        note="text for two hours of two cores: the model that comes with the package; docs/box.md has its recipe and figures",
        run=BOX,
    ),
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
        aliases=("words",),
        purpose="words of a text of a few megabytes, in minutes",
        note="words in seven minutes on two cores: tiny-word's sizes with pre-norm, Muon, neighbours and stretches; docs/experiments.md compares them",
        run=_modern(
            sized(TINY_WORD, dropout=0.2, embedding_dropout=0.1, neighbours=4, init_std=0.02),
            lanes=24,
            stretch=8,
            steps=1800,
            embedding_rate_factor=2.0,
            weight_decay=0.1,
            precision="bfloat16",
            average="ema",
            average_decay=0.99,
            validate_every=900,
            save_every=900,
        ),
    ),
)
