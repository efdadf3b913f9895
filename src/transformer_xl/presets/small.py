"""Models for two CPU cores, not in the paper; docs/experiments.md has their figures."""

from dataclasses import replace

from transformer_xl.config import EvaluationConfig, ModelConfig, RecurrentConfig, RunConfig, TrainingConfig
from transformer_xl.presets.preset import Preset, sized

_paper_demo = RunConfig(
    model=ModelConfig(vocabulary=256, n_layer=4, d_model=192, n_head=6, d_head=32, d_inner=768, memory=128),
    training=TrainingConfig(
        segment=128,
        lanes=16,
        steps=700,
        learning_rate=3e-3,
        warm_up=50,
        schedule_rule="tensorflow",
        validate_every=350,
        validation_tokens=50_000,
        save_every=200,
        log_every=10,
    ),
    evaluation=EvaluationConfig(segment=128, memory=128),
)
# Many short lanes and an average of the weights: with few lanes the weights follow the places being read.
TINY_BYTE = RunConfig(
    model=replace(_paper_demo.model, vocabulary=205),
    training=replace(
        _paper_demo.training,
        segment=64,
        lanes=32,
        steps=2450,
        learning_rate=2.5e-3,
        warm_up=100,
        average="ema",
        average_decay=0.99,
        validate_every=1225,
        validation_tokens=200_000,
        save_every=1225,
        log_every=25,
    ),
    evaluation=EvaluationConfig(segment=64, memory=128),
)
TINY_WORD = RunConfig(
    model=ModelConfig(
        vocabulary=10_000,
        n_layer=3,
        d_model=256,
        n_head=4,
        d_head=64,
        d_inner=512,
        memory=64,
        norm="pre",
        final_norm=True,
        cutoffs=(2_000, 5_000),
        dropout=0.2,
        embedding_dropout=0.1,
        init_std=0.05,
    ),
    training=TrainingConfig(
        segment=64,
        lanes=8,
        steps=9000,
        learning_rate=1.5e-3,
        embedding_rate_factor=3.0,
        warm_up=200,
        schedule_rule="tensorflow",
        validate_every=1800,
        save_every=1800,
        log_every=50,
    ),
    evaluation=EvaluationConfig(segment=64, memory=64),
)
_tiny_lstm = RunConfig(
    model=RecurrentConfig(
        vocabulary=10_000,
        cell="lstm",
        n_layer=2,
        d_model=256,
        d_hidden=384,
        cutoffs=(2_000, 5_000),
        embedding_dropout=0.2,
        hidden_dropout=0.2,
        output_dropout=0.3,
        weight_dropout=0.3,
        init_std=0.2,
    ),
    training=replace(
        TINY_WORD.training,
        segment=40,
        lanes=16,
        steps=2500,
        learning_rate=5e-3,
        embedding_rate_factor=1.0,
        validate_every=1250,
        validation_tokens=20_000,
        save_every=1250,
    ),
    evaluation=EvaluationConfig(segment=64),
)
_tiny_qrnn = sized(_tiny_lstm, cell="qrnn", n_layer=3, d_hidden=512, weight_dropout=0.0)


def _bytes(run: RunConfig, **sizes: object) -> RunConfig:
    """The same kind of model for bytes, trained as tiny-byte is."""
    still = {f"{site}_dropout": 0.0 for site in ("embedding", "hidden", "output", "weight")}
    training = replace(TINY_BYTE.training, learning_rate=5e-3)
    return replace(
        sized(run, vocabulary=205, d_model=192, cutoffs=(), init_std=0.5, **still, **sizes), training=training
    )


SMALL: tuple[Preset, ...] = (
    Preset(
        name="paper-demo",
        corpus="python",
        provenance="own",
        note="the paper's own layer and optimiser at the size of the demo; txl demo --paper trains it beside",
        run=_paper_demo,
    ),
    Preset(
        name="tiny-byte",
        corpus="enwik8",
        provenance="own",
        note="bytes of anything, a quarter of an hour on two cores; docs/experiments.md has its figures",
        run=TINY_BYTE,
    ),
    Preset(
        name="tiny-word",
        corpus="ptb",
        provenance="own",
        note="words, twenty minutes on two cores; docs/experiments.md has its figures",
        run=TINY_WORD,
    ),
    Preset(
        name="tiny-lstm",
        corpus="ptb",
        provenance="own",
        note="words, under ten minutes on two cores, regularised as AWD-LSTM; docs/experiments.md has its figures",
        run=_tiny_lstm,
    ),
    Preset(
        name="tiny-qrnn",
        corpus="ptb",
        provenance="own",
        note="words, under ten minutes on two cores; docs/experiments.md has its figures",
        run=_tiny_qrnn,
    ),
    Preset(
        name="tiny-byte-lstm",
        corpus="enwik8",
        provenance="own",
        note="tiny-byte as an LSTM of the same size",
        run=_bytes(_tiny_lstm, d_hidden=512),
    ),
    Preset(
        name="tiny-byte-qrnn",
        corpus="enwik8",
        provenance="own",
        note="tiny-byte as a QRNN of the same size",
        run=_bytes(_tiny_qrnn, d_hidden=576),
    ),
)
