"""What every engine does with the hidden states that it reads: distributions and losses. How it reads and remembers is its own."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from transformer_xl.errors import InputError
from transformer_xl.inference.weights import Linear
from transformer_xl.model import AnyModel
from transformer_xl.model.protocol import NOT_FINITE, check_tokens

CHUNK = 512
"""Longer texts are read in pieces of so many tokens, all lanes together, where it makes no difference."""
LEAST_CHUNK = 96
"""And of no fewer in one lane."""


def chunk_of(lanes: int) -> int:
    """How many tokens of each lane are read at a time."""
    return max(LEAST_CHUNK, CHUNK // lanes)


class Reader(ABC):
    model: AnyModel
    linear: Linear
    read_B: Tensor
    """How many tokens each lane has read since it started."""
    last_hidden_BD: Tensor | None
    """What the next token will be predicted from."""

    @property
    def lanes(self) -> int:
        return len(self.read_B)

    @property
    def chunk(self) -> int:
        return chunk_of(self.lanes)

    @abstractmethod
    def read(self, tokens_BT: Tensor) -> Tensor:
        """The last layer's output for the next tokens of every lane, [B, T, D]."""

    @abstractmethod
    def reset(self, lanes: Iterable[int]) -> None:
        """These lanes start anew."""

    @abstractmethod
    def select(self, lanes: Iterable[int]) -> Self:
        """A new engine with these lanes, in this order; a lane named twice is forked. The weights are shared, the memory is not."""

    @classmethod
    @abstractmethod
    def joined(cls, engines: Sequence[Any]) -> Self:
        """One engine with the lanes of all, in order: texts of different lengths go on side by side, each where it was."""

    @abstractmethod
    def save(self, path: Path | str) -> None:
        """Everything the engine remembers, as safetensors with a checksum; `restore_engine` reads it into an engine of the same model."""

    def fork(self) -> Self:
        return self.select(range(self.lanes))

    def grown(self, readers: Sequence[Any]) -> Self:
        """Its own lanes and those of others after them. For a batch whose lanes come and go: this engine itself is used up, the others are not."""
        return self.joined([self, *readers])

    def without(self, lanes: Collection[int]) -> tuple[Self, list[int]]:
        """The lanes but these, and which of the former lanes each now is; this engine itself is used up. At least one must stay."""
        stay = [lane for lane in range(self.lanes) if lane not in lanes]
        return self.select(stay), stay

    @torch.inference_mode()
    def feed(self, tokens_BT: Tensor) -> Tensor:
        """Reads the tokens; log-probabilities of the one after them, [B, V]."""
        return self.model.vocabulary.log_probabilities(self.read(tokens_BT)[:, -1], linear=self.linear)

    @torch.inference_mode()
    def head_logits(self, hidden_BD: Tensor) -> Tensor:
        """The vocabulary's, with this engine's weights."""
        return self.model.vocabulary.head_logits(hidden_BD, linear=self.linear)

    @torch.inference_mode()
    def cluster_logits(self, cluster: int, hidden_BD: Tensor) -> Tensor:
        return self.model.vocabulary.cluster_logits(cluster, hidden_BD, linear=self.linear)

    @torch.inference_mode()
    def score(self, tokens_BT: Tensor) -> Tensor:
        """Reads the tokens; the loss of each in nats given all before it, [B, T]. NaN for the first of a lane that has read nothing."""
        before_BD, unread_B = self.last_hidden_BD, self.read_B == 0
        hidden_BTD = self.read(tokens_BT)
        if before_BD is None:
            before_BD = torch.zeros_like(hidden_BTD[:, 0])
        before_BTD = torch.cat([before_BD[:, None], hidden_BTD[:, :-1]], dim=1)
        loss_BT = self.model.vocabulary.loss(before_BTD, tokens_BT.long(), linear=self.linear)
        if bool(loss_BT.isnan().any()):
            raise InputError(NOT_FINITE)
        loss_BT[unread_B.to(loss_BT.device), 0] = float("nan")
        return loss_BT

    def _check_reading(self, tokens_BT: Tensor) -> None:
        check_tokens(tokens_BT, vocabulary=self.model.config.vocabulary)
        if self.model.training:
            raise InputError(
                "the model is in training mode, where dropout is on; call model.eval() before reading with it"
            )
        if tokens_BT.shape[0] != self.lanes:
            raise InputError(f"tokens for {tokens_BT.shape[0]} lanes, where the engine has {self.lanes}")

    def _check_lanes(self, lanes: list[int]) -> None:
        for lane in lanes:
            if not 0 <= lane < self.lanes:
                raise InputError(f"lane {lane} does not exist; this engine has lanes 0 to {self.lanes - 1}")


def joined_last_hidden(readers: Sequence[Reader]) -> Tensor | None:
    """Of all their lanes; zeros where a reader has read nothing, for nothing is predicted there."""
    known = [reader.last_hidden_BD for reader in readers if reader.last_hidden_BD is not None]
    if not known:
        return None
    return torch.cat(
        [
            known[0].new_zeros(reader.lanes, known[0].shape[1])
            if reader.last_hidden_BD is None
            else reader.last_hidden_BD
            for reader in readers
        ]
    )
