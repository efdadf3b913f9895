"""What a model and a run are, as values: frozen, checked before any data is read, no torch."""

from transformer_xl.config.adaptation import AdaptationConfig
from transformer_xl.config.model import DROPOUT_SITES, ModelConfig
from transformer_xl.config.recurrent import RecurrentConfig
from transformer_xl.config.run import EvaluationConfig, RunConfig, TrainingConfig
from transformer_xl.config.vocabulary import NOT_A_TARGET, VocabularyConfig

__all__ = [
    "DROPOUT_SITES",
    "NOT_A_TARGET",
    "AdaptationConfig",
    "EvaluationConfig",
    "ModelConfig",
    "RecurrentConfig",
    "RunConfig",
    "TrainingConfig",
    "VocabularyConfig",
]
