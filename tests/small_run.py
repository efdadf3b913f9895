"""The smallest run that still has memory, lanes, validation and checkpoints; and its data."""

from pathlib import Path

from transformer_xl.cli import main
from transformer_xl.config import EvaluationConfig, ModelConfig, RunConfig, TrainingConfig
from transformer_xl.data.store import Store, open_store

SMALL = RunConfig(
    model=ModelConfig(vocabulary=256, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32, memory=12),
    training=TrainingConfig(
        segment=12,
        lanes=4,
        steps=20,
        learning_rate=1e-2,
        validate_every=10,
        validation_tokens=200,
        save_every=10,
        log_every=5,
    ),
    evaluation=EvaluationConfig(segment=12, memory=12),
)


def prepare(source: Path, out: Path, tokenizer: str, *more: str) -> Store:
    assert main(["prepare", str(source), "--tokenizer", tokenizer, "--out", str(out), *more]) == 0
    return open_store(out)
