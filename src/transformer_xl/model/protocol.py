"""What every language model here takes and gives: tokens, targets and a state in; losses per token, in order, and the new state out.

Axes, for the whole room: B lane, T position in segment, M memory, S = M+T, R distance, H head, K head width, D model width,
F inner width, E embedding width, V vocabulary, N layer, 1 broadcast.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from transformer_xl.config import NOT_A_TARGET
from transformer_xl.errors import InputError

State = TypeVar("State")

NOT_FINITE = "the model computes numbers that are not finite here, and anything told from them would be wrong; use an older checkpoint"
"""For whoever would make a figure or a text of such numbers."""


@dataclass(frozen=True, kw_only=True)
class Output(Generic[State]):
    loss_BT: Tensor | None
    """loss_BT[b, t] in nats is that of targets_BT[b, t]; None without targets."""
    hidden_BTD: Tensor
    """The last layer's output, from which `log_probabilities` makes a distribution."""
    memory: State
    """What the next segment of these lanes is to be given."""
    auxiliary_loss: Tensor | None = None
    """Al-Rfou's extra losses, a single number to be added to the mean loss in training; None where there are none."""


class LanguageModel(Protocol[State]):
    """Transformer-XL, its ablations and the recurrent baselines; evaluation, generation and analysis know nothing else."""

    def __call__(
        self, tokens_BT: Tensor, *, targets_BT: Tensor | None = None, memory: State | None = None
    ) -> Output[State]: ...

    def log_probabilities(self, hidden_BTD: Tensor) -> Tensor: ...


def check_tokens(tokens_BT: Tensor, *, vocabulary: int, name: str = "tokens", lowest: int = 0) -> None:
    """Shapes and ranges are checked at the door, not promised in comments."""
    if not isinstance(tokens_BT, Tensor):
        raise InputError(f"{name}: expected a tensor of shape [lanes, positions], found {type(tokens_BT).__name__}")
    whole = tokens_BT.dtype in (torch.int64, torch.int32) and tokens_BT.layout == torch.strided
    if tokens_BT.dim() != 2 or not whole:
        raise InputError(
            f"{name}: expected whole numbers (int64 or int32) of shape [lanes, positions], found {tokens_BT.dtype} {list(tokens_BT.shape)}"
        )
    if 0 in tokens_BT.shape:
        raise InputError(
            f"{name}: shape {list(tokens_BT.shape)} holds no tokens; give at least one lane and one position"
        )
    # On an accelerator the check would wait for the device, every step; there the embedding's own bounds check stands in.
    if tokens_BT.device.type == "cpu":
        low, high = int(tokens_BT.min()), int(tokens_BT.max())
        if low < lowest or high >= vocabulary:
            outside = low if low < lowest else high
            raise InputError(
                f"{name}: {outside} is outside the vocabulary of {vocabulary}; use the tokenizer this model was trained with"
            )


def check_segment(tokens_BT: Tensor, targets_BT: Tensor | None, *, vocabulary: int) -> tuple[int, int]:
    """Lanes and length of a segment whose tokens and targets fit each other and the vocabulary."""
    check_tokens(tokens_BT, vocabulary=vocabulary)
    B, T = tokens_BT.shape
    if targets_BT is not None:
        check_tokens(targets_BT, vocabulary=vocabulary, name="targets", lowest=NOT_A_TARGET)
        if targets_BT.shape[0] != B or targets_BT.shape[1] > T:
            raise InputError(
                f"targets: shape {list(targets_BT.shape)} does not fit tokens {[B, T]}; give the last positions of each lane"
            )
    return B, T
