"""A trained model at rest, and the one door through which everybody else gets it."""

from transformer_xl.checkpoint.folder import (
    About,
    Checkpoint,
    is_ours,
    load_checkpoint,
    read_training_state,
    same_tokenizer,
    save_tensors,
    verified_folder,
    verify,
    write_checkpoint,
)
from transformer_xl.checkpoint.run_folder import RunFolder
from transformer_xl.checkpoint.training_state import Counters, TrainingState, Window

__all__ = [
    "About",
    "Checkpoint",
    "Counters",
    "RunFolder",
    "TrainingState",
    "Window",
    "is_ours",
    "load_checkpoint",
    "read_training_state",
    "same_tokenizer",
    "save_tensors",
    "verified_folder",
    "verify",
    "write_checkpoint",
]
