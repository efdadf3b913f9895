"""A trained model at rest, and the one door through which everybody else gets it."""

from transformer_xl.checkpoint.folder import About as About
from transformer_xl.checkpoint.folder import Checkpoint as Checkpoint
from transformer_xl.checkpoint.folder import is_ours as is_ours
from transformer_xl.checkpoint.folder import load_checkpoint as load_checkpoint
from transformer_xl.checkpoint.folder import read_training_state as read_training_state
from transformer_xl.checkpoint.folder import same_tokenizer as same_tokenizer
from transformer_xl.checkpoint.folder import save_tensors as save_tensors
from transformer_xl.checkpoint.folder import verified_folder as verified_folder
from transformer_xl.checkpoint.folder import verify as verify
from transformer_xl.checkpoint.folder import write_checkpoint as write_checkpoint
from transformer_xl.checkpoint.run_folder import RunFolder as RunFolder
from transformer_xl.checkpoint.training_state import Counters as Counters
from transformer_xl.checkpoint.training_state import Timetable as Timetable
from transformer_xl.checkpoint.training_state import TrainingState as TrainingState
from transformer_xl.checkpoint.training_state import Window as Window
