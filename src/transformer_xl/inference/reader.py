"""Whatever reads text with a trained model: hidden states, distributions and losses out, lanes that come and go, a state that can be saved.

    kept                       what a reader remembers of its lanes
    Cache            engine    keys and values of the last M positions
    RecurrentState   recurrent the state of an lstm or qrnn
    Texts            windows   the last tokens themselves, read again with every new one: for models without memory

Everybody else knows this interface alone; `make_reader` makes the one that fits a model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from transformer_xl.devices import to_device
from transformer_xl.errors import CheckpointError, InputError, shown
from transformer_xl.inference.weights import Linear
from transformer_xl.model import AnyMemory, AnyModel
from transformer_xl.model.products import computing_in
from transformer_xl.model.protocol import NOT_FINITE, check_tokens
from transformer_xl.tensor_files import Kind, TensorFile, reading, write_tensors

CHUNK = 512
"""Longer texts are read in pieces of so many tokens, all lanes together, where it makes no difference."""
LEAST_CHUNK = 96
"""And of no fewer in one lane."""
SAVED = "a saved engine"
MOST_READ = 1 << 53
"""No lane gets there, and counting on from there cannot overflow."""


def chunk_of(lanes: int) -> int:
    """How many tokens of each lane are read at a time."""
    return max(LEAST_CHUNK, CHUNK // lanes)


class Kept(Protocol):
    """What a reader remembers, lane by lane."""

    def select(self, lanes: list[int], /) -> Self: ...

    def grown(self, others: Sequence[Any], /) -> Self:
        """Its own lanes, then those of others. It is itself used up, they are not."""

    def reordered(self, order: list[int], /) -> Self:
        """Fewer lanes, in this order. It is itself used up."""

    def tensors(self) -> dict[str, Tensor]: ...


class Reader(ABC):
    model: AnyModel
    linear: Linear
    kept: Any
    memory: int = 0
    """How many positions before a token it sees; 0 where no such number says what it remembers."""
    read_B: Tensor
    """How many tokens each lane has read since it started."""
    last_hidden_BD: Tensor | None = None
    """What the next token will be predicted from."""
    writes: bool = False
    """Whether `write` can be asked."""

    def __init__(self, model: AnyModel, *, lanes: int, kept: Callable[[], Kept]) -> None:
        """`kept` makes what is remembered of so many lanes, or says that there is no room for it: before anything else is made for them."""
        if type(lanes) is not int:
            raise InputError(f"lanes {lanes!r} must be a whole number")
        if lanes < 1:
            raise InputError(f"an engine of {shown(lanes)} lanes cannot be; give at least 1")
        self.model, self.kept = model, kept()
        self.read_B = torch.zeros(lanes, dtype=torch.int64)

    @property
    def lanes(self) -> int:
        return len(self.read_B)

    @property
    def edges(self) -> tuple[int, ...]:
        """Between which tokens the clusters lie that logits are asked for by."""
        return self.model.config.cluster_edges

    @property
    def chunk(self) -> int:
        return chunk_of(self.lanes)

    # --- reading

    def tokens(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """As many of each lane, [B, T], where the model is."""
        return to_device(torch.tensor(rows), self.model.vocabulary.bias_V.device)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Products within are in the precision that the model is read in."""
        with torch.inference_mode(), computing_in(self.model.reads_in, self.model.vocabulary.bias_V.device):
            yield

    def read(self, tokens_BT: Tensor) -> Tensor:
        """The last layer's output for the next tokens of every lane, [B, T, D]."""
        check_tokens(tokens_BT, vocabulary=self.model.config.vocabulary)
        if self.model.training:
            raise InputError(
                "the model is in training mode, where dropout is on; call model.eval() before reading with it"
            )
        if tokens_BT.shape[0] != self.lanes:
            raise InputError(f"tokens for {tokens_BT.shape[0]} lanes, where the engine has {self.lanes}")
        step = self._at_once(tokens_BT.shape[1])
        with self.computing():
            parts = [self._read(tokens_BT[:, start : start + step]) for start in range(0, tokens_BT.shape[1], step)]
            hidden_BTD = torch.cat(parts, dim=1).to(self.model.vocabulary.bias_V.dtype)
        self.read_B = self.read_B + tokens_BT.shape[1]
        self.last_hidden_BD = hidden_BTD[:, -1]
        return hidden_BTD

    def _at_once(self, tokens: int) -> int:
        """In pieces of how many tokens so many are read."""
        return self.chunk

    @abstractmethod
    def _read(self, tokens_BT: Tensor) -> Tensor:
        """One piece, of tokens that were checked."""

    def remember(self, memory: AnyMemory) -> None:
        """As if these lanes had read what a model returned this memory after. What comes next is not known before more is read."""
        raise InputError("a model without memory keeps nothing; read its text again")

    def write(self, tokens: Sequence[int], choices: Any, steps: int = 1) -> list[list[int]]:
        """Each lane reads its token and draws the next one, `steps` times, all below Python: for each step what `read` and then `Distribution` would
        give, word for word."""
        raise NotImplementedError

    @property
    def most_steps(self) -> int:
        """How many it is worth to `write` in one call."""
        return 1

    def reset(self, lanes: Iterable[int]) -> None:
        """These lanes start anew."""
        chosen = self._checked(lanes)
        with self.computing():
            self.read_B[chosen] = 0
            self._reset(chosen)

    @abstractmethod
    def _reset(self, lanes: list[int]) -> None: ...

    def feed(self, tokens_BT: Tensor) -> Tensor:
        """Reads the tokens; log-probabilities of the one after them, [B, V]."""
        return self.log_probabilities(self.read(tokens_BT)[:, -1])

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """The vocabulary's, as the three after it, with this engine's weights."""
        with self.computing():
            return self.model.vocabulary.log_probabilities(hidden, linear=self.linear)

    def head_logits(self, hidden_BD: Tensor) -> Tensor:
        with self.computing():
            return self.model.vocabulary.head_logits(hidden_BD, linear=self.linear)

    def cluster_logits(self, cluster: int, hidden_BD: Tensor) -> Tensor:
        with self.computing():
            return self.model.vocabulary.cluster_logits(cluster, hidden_BD, linear=self.linear)

    def loss(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        with self.computing():
            return self.model.vocabulary.loss(hidden_BTD, targets_BT, linear=self.linear)

    @torch.inference_mode()
    def score(self, tokens_BT: Tensor) -> Tensor:
        """Reads the tokens; the loss of each in nats given all before it, [B, T]. NaN for the first of a lane that has read nothing."""
        before_BD, unread_B = self.last_hidden_BD, self.read_B == 0
        hidden_BTD = self.read(tokens_BT)
        if before_BD is None:
            before_BD = torch.zeros_like(hidden_BTD[:, 0])
        before_BTD = torch.cat([before_BD[:, None], hidden_BTD[:, :-1]], dim=1)
        loss_BT = self.loss(before_BTD, tokens_BT.long())
        if bool(loss_BT.isnan().any()):
            raise InputError(NOT_FINITE)
        loss_BT[:, 0] = loss_BT[:, 0].masked_fill(to_device(unread_B, loss_BT.device), float("nan"))
        return loss_BT

    # --- lanes come and go

    @torch.inference_mode()
    def select(self, lanes: Iterable[int]) -> Self:
        """A new reader with these lanes, in this order; a lane named twice is forked. The weights are shared, what is remembered is not."""
        chosen = self._checked(lanes)
        other = copy(self)
        other.kept = self.kept.select(chosen)
        other._follow(chosen)
        return other

    def fork(self) -> Self:
        return self.select(range(self.lanes))

    @classmethod
    def joined(cls, readers: Sequence[Self]) -> Self:
        """One reader with the lanes of all, in order: texts of different lengths go on side by side, each where it was."""
        return readers[0].fork().grown(readers[1:])

    @torch.inference_mode()
    def grown(self, readers: Sequence[Self]) -> Self:
        """Its own lanes and those of others after them. For a batch whose lanes come and go: this reader itself is used up, the others are not."""
        if any(reader.model is not self.model or reader.memory != self.memory for reader in readers):
            raise InputError("engines of several models or memories cannot be joined; select or fork them from one")
        self.kept = self.kept.grown([reader.kept for reader in readers])
        self.last_hidden_BD = _joined_last_hidden([self, *readers])
        self.read_B = torch.cat([self.read_B, *(reader.read_B for reader in readers)])
        return self

    @torch.inference_mode()
    def without(self, lanes: Collection[int]) -> tuple[Self, list[int]]:
        """The lanes but these, and which of the former lanes each now is: the last move into the places that become free. This reader itself is used
        up. At least one must stay."""
        self._checked(lanes)
        order = list(range(self.lanes))
        for lane in sorted(lanes, reverse=True):
            last = order.pop()
            if lane < len(order):
                order[lane] = last
        self.kept = self.kept.reordered(order)
        self._follow(order)
        return self, order

    def _follow(self, lanes: list[int]) -> None:
        self.read_B, last_BD = self.read_B[lanes], self.last_hidden_BD
        if last_BD is not None:
            self.last_hidden_BD = last_BD[to_device(torch.tensor(lanes, dtype=torch.int64), last_BD.device)]

    def _checked(self, lanes: Iterable[int]) -> list[int]:
        chosen = list(lanes)
        for lane in chosen:
            if not 0 <= lane < self.lanes:
                raise InputError(f"lane {lane} does not exist; this engine has lanes 0 to {self.lanes - 1}")
        return chosen

    # --- at rest, where anybody may have written it

    def save(self, path: Path | str) -> None:
        """Everything that is remembered, as safetensors with a checksum; `restore_reader` reads it into a reader of the same model."""
        tensors, like = {**self.kept.tensors(), "read": self.read_B}, self.model.vocabulary.bias_V
        if self.last_hidden_BD is not None:
            tensors["last_hidden"] = self.last_hidden_BD.contiguous()
        # Of whatever precision it was read in: as the model's own, which holds each exactly.
        whole = {name: value.to(like.dtype) if value.is_floating_point() else value for name, value in tensors.items()}
        write_tensors(path, whole, metadata=self.about())

    def about(self) -> dict[str, str]:
        """What a saved reader says of itself beside its tensors."""
        return {}

    @classmethod
    def restore(cls, model: Any, path: Path | str, *, lanes: int | None = None, **how: Any) -> Self:
        """As it was saved: with as many lanes (where they are told), and made as `how` says, which must be how it was made."""
        with reading(path, what=SAVED) as file:
            lanes = _saved_lanes(file, asked=lanes)
            tensors = _saved_tensors(file, cls.checked_kinds(file, model, lanes=lanes, **how), model=model, lanes=lanes)
        try:
            reader = cls(model, lanes=lanes, **how)
        except (InputError, RuntimeError):  # the second is torch's way to say that there is no room
            raise CheckpointError(f"{path} has {lanes:,} lanes, for which there is no memory here") from None
        reader.read_B, reader.last_hidden_BD = tensors["read"], tensors.get("last_hidden")
        reader.take(path, tensors)
        return reader

    @classmethod
    def checked_kinds(cls, file: TensorFile, model: Any, *, lanes: int, **how: Any) -> dict[str, Kind]:
        """What this kind of reader keeps beside `read` and `last_hidden`; what the file says of itself is right."""
        raise InputError("a model without memory keeps nothing that could be restored; read its text again")

    def take(self, path: Path | str, tensors: Mapping[str, Tensor]) -> None:
        """What `kept.tensors` gave, as it came from the file, of the kinds that were asked for."""
        raise NotImplementedError


def _saved_lanes(file: TensorFile, *, asked: int | None) -> int:
    """How many it has, by its own count of what each has read."""
    shape = file.kinds["read"].shape if "read" in file.kinds else ()
    if len(shape) != 1 or not shape[0]:
        raise CheckpointError(f"{file.path} is not {SAVED}, or is damaged: it does not say what each lane has read")
    if asked not in (None, shape[0]):
        raise CheckpointError(f"{file.path} has {shape[0]} lanes where {asked} are asked for; give lanes={shape[0]}")
    return shape[0]


def _saved_tensors(file: TensorFile, wanted: Mapping[str, Kind], *, model: AnyModel, lanes: int) -> dict[str, Tensor]:
    """Where the model is."""
    like = model.vocabulary.bias_V
    common = {"read": Kind(torch.int64, (lanes,)), "last_hidden": Kind(like.dtype, (lanes, model.config.d_model))}
    file.check({**wanted, **common}, asker="this model", optional=("last_hidden",))
    tensors = file.tensors()
    for lane, read in enumerate(tensors["read"].tolist()):
        if not 0 <= read <= MOST_READ:
            raise CheckpointError(f"{file.path}: read is {read} in lane {lane}, which is no number of tokens")
        if read and "last_hidden" not in tensors:
            raise CheckpointError(
                f"{file.path} lacks last_hidden, from which the token after the {read:,} of lane {lane} is predicted"
            )
    # Counts stay on the CPU, and nothing stays in the mapped file.
    return {
        name: value.to(like.device, copy=True) if value.is_floating_point() else value.clone()
        for name, value in tensors.items()
    }


def _joined_last_hidden(readers: Sequence[Reader]) -> Tensor | None:
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
