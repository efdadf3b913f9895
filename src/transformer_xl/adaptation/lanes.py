"""One lane of a text that is read and learned from. Of each token its loss given all before it, and only then a lesson.

Still      weights that stand still, by a reader as it is; a cache may learn
Learning   weights that move, a segment at a time:

tokens     x x x x | x x x x | x x            cut every T tokens since the lane began, however they come
weights     score, learn  score, learn        from a segment once it is whole and every token of it was told
pending                        x x            what is not whole yet is scored, and read again with what follows
"""

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.adaptation.fast_weights import FastWeights
from transformer_xl.adaptation.neural_cache import NeuralCache
from transformer_xl.errors import InputError
from transformer_xl.inference import Reader, make_reader
from transformer_xl.model import AnyMemory, AnyModel
from transformer_xl.model.protocol import NOT_FINITE


@dataclass
class Writer:
    """What a text can be continued with: weights as they have become, which learn no more, and a cache that goes on filling."""

    reader: Reader
    cache: NeuralCache | None
    last: int
    """The token that was read last."""


class Lane(ABC):
    cache: NeuralCache | None
    read: int = 0
    """Tokens since it began."""

    @abstractmethod
    def score(self, token_T: Tensor) -> Tensor:
        """Of tokens that come next, in nats; NaN for the first of all."""

    @abstractmethod
    def forked(self) -> "Lane":
        """Another that goes on from here. Shares nothing that changes."""

    @abstractmethod
    def writer(self) -> "Writer":
        """With what was learned, after everything that was read; it goes on alone."""


class Still(Lane):
    def __init__(self, reader: Reader, cache: NeuralCache | None) -> None:
        self.reader, self.cache, self.last = reader, cache, 0
        """`last`: the token that was read last."""

    @torch.inference_mode()
    def score(self, token_T: Tensor) -> Tensor:
        if self.cache is None:
            self.read += len(token_T)
            return self.reader.score(token_T[None])[0]
        begun, before_BD = self.read > 0, self.reader.last_hidden_BD
        hidden_TD = self.reader.read(token_T[None])[0]
        target_T = token_T
        if begun:
            assert before_BD is not None
            hidden_TD = torch.cat([before_BD, hidden_TD])
            token_T = torch.cat([token_T.new_tensor([self.last]), token_T])
        else:
            target_T = token_T[1:]
        self.read, self.last = self.read + len(token_T) - begun, int(token_T[-1])
        hidden_TD, token_T = hidden_TD[:-1], token_T[:-1]
        found_T = hidden_TD.new_full((0 if begun else 1,), float("nan"))
        if not len(target_T):
            return found_T
        model = self.reader.model
        loss_T = model.vocabulary.loss(hidden_TD[None], target_T[None], linear=self.reader.linear)[0]
        mixed_T = self.cache.mixed(loss_T, hidden_TD, token_T, target_T)
        if bool(mixed_T.isnan().any()):
            raise InputError(NOT_FINITE)
        self.cache.extend(hidden_TD, token_T, target_T)
        return torch.cat([found_T.to(mixed_T), mixed_T])

    def forked(self) -> "Still":
        other = copy(self)
        other.reader, other.cache = self.reader.fork(), None if self.cache is None else self.cache.copied()
        return other

    def writer(self) -> Writer:
        fork = self.forked()
        return Writer(reader=fork.reader, cache=fork.cache, last=fork.last)


class Learning(Lane):
    def __init__(self, fast: FastWeights, cache: NeuralCache | None) -> None:
        self.fast, self.cache = fast, cache
        self.weights: list[Tensor] = fast.fresh()
        self.memory: AnyMemory = fast.model.start_memory(1)
        """Before the tokens that are pending."""
        self.pending_P = torch.zeros(0, dtype=torch.int64, device=fast.model.vocabulary.bias_V.device)

    def score(self, token_T: Tensor) -> Tensor:
        model, segment = self.fast.use(self.weights), self.fast.how.segment
        # `told`: how many of the next targets have been scored already.
        row_P, told = torch.cat([self.pending_P, token_T]), max(0, len(self.pending_P) - 1)
        found = [] if len(self.pending_P) else [model.vocabulary.bias_V.new_full((1,), float("nan"))]
        while len(row_P) > segment:
            found.append(self._lesson(model, row_P[:segment], row_P[1 : segment + 1])[told:])
            row_P, told = row_P[segment:], 0
        if len(row_P) - 1 > told:
            found.append(self._ahead(model, row_P[:-1], row_P[1:])[told:])
        self.read, self.pending_P = self.read + len(token_T), row_P.clone()
        return torch.cat(found)

    def _lesson(self, model: AnyModel, token_T: Tensor, target_T: Tensor) -> Tensor:
        """The losses of a whole segment, as they were before anything was learned from it."""
        with torch.inference_mode(False), torch.enable_grad():
            token_T, target_T = (
                token_T.clone(),
                target_T.clone(),
            )  # they may come from a reader, where nothing has gradients
            output = model(token_T[None], targets_BT=target_T[None], memory=self.memory)
            assert output.loss_BT is not None
            loss_T, hidden_TD = output.loss_BT[0].detach().clone(), output.hidden_BTD[0].detach()
            told_T = self._told(loss_T, hidden_TD, token_T, target_T)
            self.fast.learn(output.loss_BT.mean())
        self.memory = output.memory
        if self.cache is not None:
            self.cache.extend(hidden_TD, token_T, target_T)
        return told_T

    @torch.no_grad()
    def _ahead(self, model: AnyModel, token_T: Tensor, target_T: Tensor) -> Tensor:
        """The losses of a segment that is not whole yet. Nothing is kept."""
        output = model(token_T[None], targets_BT=target_T[None], memory=self.memory)
        assert output.loss_BT is not None
        return self._told(output.loss_BT[0], output.hidden_BTD[0], token_T, target_T)

    def _told(self, loss_T: Tensor, hidden_TD: Tensor, token_T: Tensor, target_T: Tensor) -> Tensor:
        if bool(loss_T.isnan().any()):
            raise InputError(
                f"after {self.read:,} tokens the weights have moved to where the model computes no finite numbers; take a smaller adaptation.rate"
            )
        return loss_T if self.cache is None else self.cache.mixed(loss_T, hidden_TD, token_T, target_T)

    def forked(self) -> "Learning":
        other = copy(self)
        other.weights = [weight.clone() for weight in self.weights]
        other.cache = None if self.cache is None else self.cache.copied()
        return other

    def writer(self) -> Writer:
        if not len(self.pending_P):
            raise InputError("a lane that has read nothing has nothing to continue; give it at least one token")
        reader, cache = make_reader(self.fast.snapshot(self.weights)), None
        reader.remember(self.memory)
        hidden_PD = reader.read(self.pending_P[None])[0]
        if self.cache is not None:
            cache = self.cache.copied()
            cache.extend(hidden_PD[:-1], self.pending_P[:-1], self.pending_P[1:])
        return Writer(reader=reader, cache=cache, last=int(self.pending_P[-1]))
