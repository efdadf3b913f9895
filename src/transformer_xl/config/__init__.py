"""What a model and a run are, as values: frozen, checked before any data is read, no torch."""

from transformer_xl.config.model import DROPOUT_SITES, ENCODINGS, ModelConfig
from transformer_xl.config.recurrent import RecurrentConfig
from transformer_xl.config.run import EvaluationConfig, RunConfig, TrainingConfig
from transformer_xl.config.vocabulary import VocabularyConfig

__all__ = [
    "DROPOUT_SITES",
    "ENCODINGS",
    "EvaluationConfig",
    "ModelConfig",
    "RecurrentConfig",
    "RunConfig",
    "TrainingConfig",
    "VocabularyConfig",
]
