"""The next token's distribution, as much of it as a question needs. Comes from hidden states; knows no text and no randomness.

    head      w w w w w w | tail 1 | tail 2      one log-softmax: words, and for each tail the probability of all its words together
    tail 1    w w w w w w w w w w                opened only where a word in it could change the answer

No word is likelier than the tail that holds it: the tail's log-probability is a bound that costs nothing. A question is a generator: it yields the tail
it must see, goes on when that tail is open, and returns its answer. Lanes that ask for the same tail get it in one product.

Answers are about scores, which an `Adjustment` makes of log-probabilities; it lifts no word above its tail's adjusted bound, so the bound still holds.
"""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transformer_xl.devices import to_device
from transformer_xl.errors import InputError
from transformer_xl.model.protocol import NOT_FINITE

Floats = NDArray[np.floating]
Ids = NDArray[np.int64]
ROWS = 64
FEW = 256
"""So many words are sorted at first where a nucleus is asked for."""
Answer = TypeVar("Answer")
Question = Generator[int, None, Answer]


class Logits(Protocol):
    """A model's vocabulary, or an engine that computes the same faster. Both before the softmax, with biases."""

    def head_logits(self, hidden_BD: Tensor, /) -> Tensor: ...

    def cluster_logits(self, cluster: int, hidden_BD: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """score = log-probability * (penalty, for a seen token) / temperature."""

    temperature: float = 1.0
    penalty: float = 1.0
    """At least 1: a seen token's probability is raised to this power. (On log-probabilities, not logits: those of two clusters cannot be compared.)"""
    seen: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


PLAIN = Adjustment()


@dataclass(frozen=True, kw_only=True)
class Words:
    token_K: Ids
    score_K: NDArray[np.float64]


class Lane:
    """One lane's distribution as far as it is known: the words of the head and of opened tails, and each closed tail as a whole."""

    def __init__(self, head_C: Floats, *, edges: Sequence[int]) -> None:
        self.edges = edges
        self.closed = {tail: float(head_C[edges[1] + tail - 1]) for tail in range(1, len(edges) - 1)}
        """Log-probability of each tail that nobody has opened."""
        self._open: dict[int, Floats] = {0: head_C[: edges[1]]}

    def open(self, tail: int, log_probability_V: Floats) -> None:
        """`log_probability_V` of the tail's words given that it is the tail."""
        self._open[tail] = log_probability_V + self.closed.pop(tail)

    def known(self, how: Adjustment) -> tuple[Ids, NDArray[np.float64]]:
        """Known words by rising number, and their scores."""
        clusters = sorted(self._open)
        token_P = np.concatenate([np.arange(self.edges[cluster], self.edges[cluster + 1]) for cluster in clusters])
        return token_P, np.concatenate([self._scores(cluster, how) for cluster in clusters])

    def highest(self, cluster: int, k: int, how: Adjustment) -> Words:
        """The k highest scores of a known cluster, falling."""
        if how.penalty == 1.0:  # then scores stand in the order of log-probabilities, and only the k need become scores
            place_K = _highest(self._open[cluster], k)
            score_K = self._open[cluster][place_K].astype(np.float64) / how.temperature
        else:
            score_V = self._scores(cluster, how)
            place_K = _highest(score_V, k)
            score_K = score_V[place_K]
        return Words(token_K=place_K + self.edges[cluster], score_K=score_K)

    def _scores(self, cluster: int, how: Adjustment) -> NDArray[np.float64]:
        score_V = self._open[cluster].astype(np.float64)
        low, high = self.edges[cluster : cluster + 2]
        score_V[how.seen[(how.seen >= low) & (how.seen < high)] - low] *= how.penalty
        score_V /= how.temperature
        return score_V

    def log_probability(self, token: int) -> float:
        """Of a known word."""
        cluster = next(cluster for cluster in self._open if self.edges[cluster] <= token < self.edges[cluster + 1])
        return float(self._open[cluster][token - self.edges[cluster]])

    def likeliest_closed(self) -> int | None:
        return max(self.closed, key=self.closed.__getitem__, default=None)

    def bound(self, tail: int, how: Adjustment) -> float:
        """No word of this closed tail has a higher score."""
        return self.closed[tail] / how.temperature

    def mass(self, tail: int, how: Adjustment) -> tuple[float, float]:
        """Between which logs the sum of exp(score) of a closed tail's words lies.

        n words of probability P together, each raised to the power a = 1/temperature: P^a if one word has it all, n (P/n)^a if they share it
        evenly, and anything else lies between. Without temperature both are P. Penalties only take away.
        """
        power, size = 1.0 / how.temperature, self.edges[tail + 1] - self.edges[tail]
        one, even = power * self.closed[tail], power * self.closed[tail] + (1.0 - power) * math.log(size)
        return -math.inf if self._holds_seen(tail, how) else min(one, even), max(one, even)

    def _holds_seen(self, tail: int, how: Adjustment) -> bool:
        low, high = self.edges[tail : tail + 2]
        return how.penalty != 1.0 and bool(((how.seen >= low) & (how.seen < high)).any())


class Distribution:
    """The lanes' distributions after `hidden_BD`; `opened` counts the tails computed, one for each lane."""

    @torch.inference_mode()
    def __init__(self, source: Logits, hidden_BD: Tensor, *, edges: Sequence[int]) -> None:
        self._source, self._hidden_BD = source, hidden_BD
        self.opened = 0
        logits_BC = source.head_logits(hidden_BD)
        # Without tails all of it is in double precision, as the kernels have it (native/drawing.h): so both draw the same word for the same share.
        head_BC = _log_softmax(logits_BC.double() if len(edges) == 2 else logits_BC)
        self.lanes = [Lane(head_C, edges=edges) for head_C in head_BC]

    def ask(self, questions: Sequence[Callable[[Lane], Question[Answer]]]) -> list[Answer]:
        """One question for each lane, and their answers."""
        asking = [question(lane) for question, lane in zip(questions, self.lanes, strict=True)]
        answers: dict[int, Answer] = {}
        waiting: Iterable[int] = range(len(asking))
        while len(answers) < len(asking):
            wanted: dict[int, list[int]] = {}
            for lane in waiting:
                try:
                    wanted.setdefault(next(asking[lane]), []).append(lane)
                except StopIteration as answered:
                    answers[lane] = answered.value
            for tail, lanes in wanted.items():
                self._open(tail, lanes)
            waiting = [lane for lanes in wanted.values() for lane in lanes]
        return [answers[lane] for lane in range(len(asking))]

    @torch.inference_mode()
    def _open(self, tail: int, lanes: list[int]) -> None:
        hidden_BD = self._hidden_BD
        if len(lanes) < len(self.lanes):
            hidden_BD = hidden_BD[to_device(torch.tensor(sorted(lanes)), hidden_BD.device)]
        tail_BV = _log_softmax(self._source.cluster_logits(tail, hidden_BD))
        for lane, log_probability_V in zip(sorted(lanes), tail_BV, strict=True):
            self.lanes[lane].open(tail, log_probability_V)
        self.opened += len(lanes)


def best(lane: Lane, k: int, *, how: Adjustment = PLAIN) -> Question[Words]:
    """The k highest scores, falling. A tail whose bound does not exceed the k-th stays closed."""
    if k < 1:
        raise InputError(f"the {k} likeliest tokens are none; ask for at least 1")
    found = lane.highest(0, k, how)
    for cluster in sorted(set(range(1, len(lane.edges) - 1)) - set(lane.closed)):
        found = _merged(found, lane.highest(cluster, k, how), k)
    while (tail := lane.likeliest_closed()) is not None:
        if len(found.score_K) == k and lane.bound(tail, how) <= found.score_K[-1]:
            break
        yield tail
        found = _merged(found, lane.highest(tail, k, how), k)
    return found


def nucleus(lane: Lane, *, p: float = 1.0, min_p: float = 0.0, how: Adjustment = PLAIN) -> Question[Words]:
    """Of all words the likeliest that together reach the share `p` (the one that crosses it included), of these the ones at least `min_p` times as likely as the first.

    The share is of the sum of exp(score) over all words, of which closed tails are known within bounds (exactly, at temperature 1): a tail is opened only
    where one of its words could belong to the answer, or where the bounds leave the answer open.
    """
    while True:
        token_P, score_P = lane.known(how)
        lowest = score_P.max() + math.log(min_p) if min_p else -math.inf
        tail = lane.likeliest_closed()
        masses = [lane.mass(closed, how) for closed in lane.closed]
        top = max(score_P.max(), *(high for _, high in masses)) if masses else score_P.max()  # exp stays in range
        known = np.exp(score_P - top).sum() if p < 1.0 else math.inf
        needed_low, needed_high = (p * (known + sum(math.exp(mass[end] - top) for mass in masses)) for end in (0, 1))
        place_K = _highest_until(score_P, lowest=lowest, needed=needed_high, top=top)
        score_K = score_P[place_K]
        reached_K = np.exp(score_K - top).cumsum()
        kept = _count_before(reached_K, needed_low)
        certain = tail is None or kept == _count_before(reached_K, needed_high)
        if tail is not None and certain:
            # What a closed tail may hold comes after all that is kept, and the share is reached without it; or it is too unlikely altogether.
            after = lane.bound(tail, how) <= score_K[kept - 1] and reached_K[kept - 1] >= needed_high
            certain = after or lane.bound(tail, how) < lowest
        if certain:
            return Words(token_K=token_P[place_K[:kept]], score_K=score_K[:kept])
        assert tail is not None
        yield tail


def shortened(words: Words, *, p: float = 1.0, min_p: float = 0.0) -> Words:
    """The same two rules within words in falling order, as if there were no others."""
    reached_K = np.exp(words.score_K - words.score_K[0]).cumsum()
    kept = _count_before(reached_K, p * reached_K[-1] if p < 1.0 else math.inf)
    if min_p:
        kept = min(kept, int(np.count_nonzero(words.score_K >= words.score_K[0] + math.log(min_p))))
    return Words(token_K=words.token_K[:kept], score_K=words.score_K[:kept])


def at_share(lane: Lane, share: float, *, how: Adjustment = PLAIN) -> Question[int]:
    """The word in which `share` of all probability is reached, words in order of their number: inverse transform sampling over the whole vocabulary.

    A closed tail stands for its words until the share falls into it; where temperature or a penalty leaves its sum unknown, it is opened at once.
    """
    while unknown := [tail for tail in lane.closed if len(set(lane.mass(tail, how))) > 1]:
        yield unknown[0]
    while True:
        token_P, score_P = lane.known(how)
        tails = sorted(lane.closed)
        first = [lane.edges[tail] for tail in tails]
        place_T = np.searchsorted(token_P, first)
        item_Q = np.insert(token_P, place_T, [-tail for tail in tails])
        log_mass_Q = np.insert(score_P, place_T, [lane.mass(tail, how)[1] for tail in tails])
        item = int(item_Q[_place_at(log_mass_Q, share)])
        if item >= 0:
            return item
        yield -item


def draw(words: Words, share: float) -> int:
    """The same among chosen words. In order of number, not of score: two words of nearly one score never change places by a rounding."""
    order_K = np.argsort(words.token_K)
    return int(words.token_K[order_K[_place_at(words.score_K[order_K], share)]])


def _place_at(log_mass_K: NDArray[np.float64], share: float) -> int:
    reached_K = np.exp(log_mass_K - log_mass_K.max()).cumsum()
    place = int(np.searchsorted(reached_K, share * reached_K[-1], side="right"))
    return min(place, len(reached_K) - 1)


def _count_before(reached_K: NDArray[np.float64], needed: float) -> int:
    """How many words until `needed` is reached, the one that reaches it included; at least one."""
    return min(int(np.searchsorted(reached_K, needed, side="left")) + 1, len(reached_K))


def _merged(one: Words, other: Words, k: int) -> Words:
    token_P, score_P = np.concatenate([one.token_K, other.token_K]), np.concatenate([one.score_K, other.score_K])
    place_K = np.argsort(-score_P, kind="stable")[:k]
    return Words(token_K=token_P[place_K], score_K=score_P[place_K])


def _highest(score_P: Floats, k: int) -> NDArray[np.intp]:
    """Places of the k highest, falling."""
    candidate_C = np.arange(len(score_P))
    columns = len(score_P) // ROWS
    if columns > 2 * k:
        # The k-th highest of the columns' maxima cannot be above the k-th highest of all: what lies under it is out, found in two quick passes.
        maximum_C = score_P[: ROWS * columns].reshape(ROWS, columns).max(axis=0)
        candidate_C = np.flatnonzero(score_P >= np.partition(maximum_C, columns - k)[columns - k])
    score_C = score_P[candidate_C]
    if k < len(score_C):
        lowest = np.partition(score_C, len(score_C) - k)[len(score_C) - k]
        above_C, alike_C = np.flatnonzero(score_C > lowest), np.flatnonzero(score_C == lowest)
        place_K = np.concatenate([above_C, alike_C[: k - len(above_C)]])  # of words that are alike, the first
    else:
        place_K = np.arange(len(score_C))
    found_K: NDArray[np.intp] = candidate_C[place_K[np.argsort(-score_C[place_K], kind="stable")]]
    return found_K


def _highest_until(score_P: NDArray[np.float64], *, lowest: float, needed: float, top: float) -> NDArray[np.intp]:
    """Places of all scores from `lowest` up, falling, or of as many as have the sum `needed`: sorting a few is far quicker than sorting all."""
    k = FEW
    while k < len(score_P):
        place_K = _highest(score_P, k)
        if score_P[place_K[-1]] < lowest or np.exp(score_P[place_K] - top).sum() >= needed:
            break
        k *= 8
    else:
        place_K = _highest(score_P, len(score_P))
    return place_K[: np.count_nonzero(score_P[place_K] >= lowest)]


def _log_softmax(logits: Tensor) -> Floats:
    precise = logits if logits.dtype == torch.float64 else logits.float()
    array: Floats = torch.log_softmax(precise, dim=-1).cpu().numpy()
    if np.isnan(array).any():
        raise InputError(NOT_FINITE)
    return array
