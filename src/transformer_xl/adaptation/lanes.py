"""One lane of a text that is read and learned from. Of each token its loss given all before it, and only then a lesson.

Still      weights that stand still, by a reader as it is; a cache may learn
Learning   weights that move, a segment at a time:

tokens     x x x x | x x x x | x x            cut every T tokens since the lane began, however they come
weights     score, learn  score, learn        from a segment once it is whole and every token of it was told
pending                        x x            what is not whole yet is scored, and read again with what follows
"""

from abc import ABC, abstractmethod
from copy import copy

import torch
from torch import Tensor

from transformer_xl.adaptation.fast_weights import FastWeights
from transformer_xl.adaptation.neural_cache import NeuralCache
from transformer_xl.errors import InputError
from transformer_xl.inference import Reader, make_reader
from transformer_xl.model import AnyMemory, AnyModel, products
from transformer_xl.model.protocol import NOT_FINITE


class CachingReader(Reader):
    """One lane of which a model and a cache predict the next token together, as one softmax. What it reads goes into the cache."""

    def __init__(self, reader: Reader, cache: NeuralCache, *, last: int) -> None:
        """`last`: the token that `reader` has read last."""
        self._reader, self._cache, self._last = reader, cache, last
        self.model, self.linear, self.memory = reader.model, reader.linear, reader.memory
        self.read_B, self.last_hidden_BD = reader.read_B, reader.last_hidden_BD

    @property
    def edges(self) -> tuple[int, ...]:
        return (0, self.model.config.vocabulary)

    def _read(self, tokens_BT: Tensor) -> Tensor:
        before_BD, token_T = self._reader.last_hidden_BD, tokens_BT[0]
        assert before_BD is not None
        hidden_BTD = self._reader.read(tokens_BT)
        read_T = torch.cat([token_T.new_tensor([self._last]), token_T[:-1]])
        self._cache.extend(torch.cat([before_BD, hidden_BTD[0, :-1]]), read_T, token_T)
        self._last = int(token_T[-1])
        return hidden_BTD

    def _reset(self, lanes: list[int]) -> None:
        raise AssertionError("its cache is of one text")

    @torch.inference_mode()
    def head_logits(self, hidden_BD: Tensor) -> Tensor:
        vocabulary, share = self.model.config.vocabulary, self._cache.how.cache_lambda
        log_1V = self.model.vocabulary.log_probabilities(hidden_BD, linear=self.linear)
        cached_V = self._cache.distribution(hidden_BD[0], self._last, vocabulary=vocabulary)
        return log_1V if cached_V is None else ((1 - share) * log_1V.exp() + share * cached_V).log()

    def cluster_logits(self, cluster: int, hidden_BD: Tensor) -> Tensor:
        raise AssertionError("there is one cluster")


class Lane(ABC):
    cache: NeuralCache | None
    read: int = 0
    """Tokens since it began."""

    @abstractmethod
    def score(self, token_T: Tensor, *, own: bool = False) -> Tensor:
        """Of tokens that come next, in nats; NaN for the first of all. `own`: the model wrote them, and weights do not learn from them."""

    @abstractmethod
    def forked(self) -> "Lane":
        """Another that goes on from here. Shares nothing that changes."""

    @abstractmethod
    def writer(self) -> Reader:
        """What goes on after everything that was read, alone: with weights as they have become, which learn no more, and a cache that goes on filling."""


class Still(Lane):
    def __init__(self, reader: Reader, cache: NeuralCache | None) -> None:
        self.reader, self.cache, self.last = reader, cache, 0
        """`last`: the token that was read last."""

    @torch.inference_mode()
    def score(self, token_T: Tensor, *, own: bool = False) -> Tensor:
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
        with products.computing_in(model.reads_in, hidden_TD.device):
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

    def writer(self) -> Reader:
        _check_begun(self)
        fork = self.forked()
        return fork.reader if fork.cache is None else CachingReader(fork.reader, fork.cache, last=fork.last)


class Learning(Lane):
    def __init__(self, fast: FastWeights, cache: NeuralCache | None) -> None:
        self.fast, self.cache = fast, cache
        self.weights: list[Tensor] = fast.fresh()
        self.memory: AnyMemory = fast.model.start_memory(1)
        """Before the tokens that are pending."""
        self.pending_P = torch.zeros(0, dtype=torch.int64, device=fast.model.vocabulary.bias_V.device)
        self.given_P = torch.zeros(0, dtype=torch.bool)
        """Which of them are learned from: those that the model did not write itself. Lives on the CPU."""

    def score(self, token_T: Tensor, *, own: bool = False) -> Tensor:
        model, segment = self.fast.use(self.weights), self.fast.how.segment
        # `told`: how many of the next targets have been scored already.
        row_P, told = torch.cat([self.pending_P, token_T]), max(0, len(self.pending_P) - 1)
        given_P = torch.cat([self.given_P, torch.full((len(token_T),), not own)])
        found = [] if len(self.pending_P) else [model.vocabulary.bias_V.new_full((1,), float("nan"))]
        past = self.read - len(self.pending_P)
        while len(row_P) > segment:
            targets = slice(1, segment + 1)
            found.append(self._lesson(model, row_P[:segment], row_P[targets], given_P[targets])[told:])
            row_P, given_P, told, past = row_P[segment:], given_P[segment:], 0, past + segment
            self._stand_at(past + 1, row_P[:1], given_P[:1])  # whatever comes next: this lesson was learned
        if len(row_P) - 1 > told:
            found.append(self._ahead(model, row_P[:-1], row_P[1:])[told:])
        self._stand_at(past + len(row_P), row_P, given_P)
        return torch.cat(found)

    def _stand_at(self, read: int, pending_P: Tensor, given_P: Tensor) -> None:
        self.read, self.pending_P, self.given_P = read, pending_P.clone(), given_P.clone()

    def _lesson(self, model: AnyModel, token_T: Tensor, target_T: Tensor, given_T: Tensor) -> Tensor:
        """The losses of a whole segment, as they were before anything was learned from it."""
        learns = bool(given_T.any())
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(learns),
            products.gradients_rounded(self.fast.rounding),
        ):
            token_T, target_T = (
                token_T.clone(),
                target_T.clone(),
            )  # they may come from a reader, where nothing has gradients
            output = model(token_T[None], targets_BT=target_T[None], memory=self.memory)
            assert output.loss_BT is not None
            loss_T, hidden_TD = output.loss_BT[0].detach().clone(), output.hidden_BTD[0].detach()
            told_T = self._told(loss_T, hidden_TD, token_T, target_T)
            if learns:
                self.fast.learn(_lesson_of(output.loss_BT[0], given_T))
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

    def writer(self) -> Reader:
        _check_begun(self)
        reader = make_reader(self.fast.snapshot(self.weights))
        reader.remember(self.memory)
        hidden_PD = reader.read(self.pending_P[None])[0]
        if self.cache is None:
            return reader
        cache = self.cache.copied()
        cache.extend(hidden_PD[:-1], self.pending_P[:-1], self.pending_P[1:])
        return CachingReader(reader, cache, last=int(self.pending_P[-1]))


def _lesson_of(loss_T: Tensor, given_T: Tensor) -> Tensor:
    """A segment's mean loss, to which what the model wrote itself adds nothing."""
    return loss_T.mean() if bool(given_T.all()) else loss_T[given_T.to(loss_T.device)].sum() / len(loss_T)


def _check_begun(lane: Lane) -> None:
    if not lane.read:
        raise InputError("a lane that has read nothing has nothing to continue; give it at least one token")
