"""What a model and a run are, as values: frozen, checked before any data is read, no torch."""

from transformer_xl.config.model import DROPOUT_SITES, ENCODINGS, ModelConfig
from transformer_xl.config.run import EvaluationConfig, RunConfig, TrainingConfig

__all__ = ["DROPOUT_SITES", "ENCODINGS", "EvaluationConfig", "ModelConfig", "RunConfig", "TrainingConfig"]
