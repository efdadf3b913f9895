"""A cache of what was seen (Grave et al. 2016): the hidden states of past positions, each with the token that came after it.

    p(w)  =  (1 - lambda) model(w)  +  lambda * sum over cached i with next_i = w of  exp(theta h . h_i)  /  the same sum over all i

With an end: the last `size` positions. Without: all, by an exact index of the tokens they were read after, so that a prediction looks at the newest few
positions with the same context, however long the text is. A position is looked at only by those after it.
"""

from collections.abc import Iterable
from copy import copy

import torch
from torch import Tensor

from transformer_xl import native
from transformer_xl.config import AdaptationConfig
from transformer_xl.model import products
from transformer_xl.model.products import WHOLE_ROWS

CANDIDATES = 64
"""Positions that a prediction looks at in a cache without end: the newest of those with its context."""
SMALLEST_THETA = 1e-30
ROOM = 512
"""Positions of a buffer beyond its size, or half of that if it is more: so many pass between two moves."""


def most_positions(how: AdaptationConfig, *, coming: int) -> int:
    """Of a cache with an end, and of its room, when so many come at a time."""
    return how.cache_size + max(ROOM, how.cache_size // 2) + coming + WHOLE_ROWS


class NeuralCache:
    """Of one lane. A value: `copied` shares nothing that changes."""

    def __init__(self, how: AdaptationConfig, *, width: int, like: Tensor) -> None:
        self.how = how
        self.hidden_ND = like.new_zeros(0, width)
        self.next_N = torch.zeros(0, dtype=torch.int64, device=like.device)
        self.first = self.end = 0
        """What is kept lies between these places of the buffers."""
        self.tokens: list[int] = []
        """For a cache without end: the last that were read, at most `cache_context`, and the very first."""
        self.start = 0
        self._index: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        return self.end - self.first

    def copied(self) -> "NeuralCache":
        other = copy(self)
        other.hidden_ND, other.next_N = self.kept()
        other.hidden_ND, other.next_N = other.hidden_ND.clone(), other.next_N.clone()
        other.first, other.end, other.tokens = 0, len(self), list(self.tokens)
        other._index = {context: list(places) for context, places in self._index.items()}
        return other

    def kept(self) -> tuple[Tensor, Tensor]:
        """States and the tokens that came after them, oldest first."""
        return self.hidden_ND[self.first : self.end], self.next_N[self.first : self.end]

    # --- asked

    def mixed(self, loss_T: Tensor, hidden_TD: Tensor, token_T: Tensor, target_T: Tensor) -> Tensor:
        """The losses of the targets of positions that come next, mixed with what is cached and with what is seen among them before each.
        `token_T` was read at each, and `hidden_TD` is what the model predicts from."""
        (cached_T,), share = self.shares(hidden_TD, token_T, target_T, self.how.cache_theta), self.how.cache_lambda
        mixed_T = -((1 - share) * (-loss_T.double()).exp() + share * cached_T.double()).log()
        return torch.where(cached_T.isnan(), loss_T, mixed_T.to(loss_T))

    def shares(self, hidden_TD: Tensor, token_T: Tensor, target_T: Tensor, *thetas: float) -> list[Tensor]:
        """What the cache alone gives each target, for each theta; NaN where it is empty."""
        hidden_SD, next_S = self._with_new(hidden_TD, target_T)
        N, size = len(self), self.how.cache_size
        if not size:
            place_TS = self._candidates(token_T.tolist()).to(next_S.device)
            unseen_TS, known_TS = place_TS < 0, place_TS.clamp(min=0)
            score_TS = torch.einsum("td,tsd->ts", hidden_TD, hidden_SD[known_TS])
            right_TS = next_S[known_TS] == target_T[:, None]
        else:
            with torch.no_grad():
                score_TS = products.linear(hidden_TD, hidden_SD)
            if native.usable(score_TS):
                past = {"past": N, "size": size}
                return [native.recall(score_TS, next_S, target_T.contiguous(), **past, theta=theta) for theta in thetas]
            unseen_TS = torch.ones_like(score_TS, dtype=torch.bool).tril_(N - 1).triu_(N - size).logical_not_()
            right_TS = next_S == target_T[:, None]
        score_TS = score_TS.masked_fill_(unseen_TS, float("-inf"))
        # A theta of 0 leaves -inf what it is.
        weights = (torch.softmax(score_TS * max(theta, SMALLEST_THETA), dim=1) for theta in thetas)
        return [(weight_TS * right_TS).sum(1) for weight_TS in weights]

    def distribution(self, hidden_D: Tensor, token: int, *, vocabulary: int) -> Tensor | None:
        """What the cache alone gives every token after `token`, which was read last; None where it is empty."""
        hidden_ND, next_N = self.kept()
        if not self.how.cache_size:
            (context,) = self._contexts([token])
            places = torch.tensor(self._index.get(context, []), dtype=torch.int64, device=next_N.device)
            hidden_ND, next_N = hidden_ND[places], next_N[places]
        if not len(next_N):
            return None
        weight_N = torch.softmax(self.how.cache_theta * (hidden_ND @ hidden_D), dim=0)
        return hidden_D.new_zeros(vocabulary).index_add_(0, next_N, weight_N)

    def _with_new(self, hidden_TD: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
        """What is kept, and behind it positions that come next, as they lie in the buffers; up to whole rows of a product, of which the last mean
        nothing."""
        T = len(target_T)
        if self.end + T + WHOLE_ROWS > len(self.next_N):
            self._move(T)
        new = slice(self.end, self.end + T)
        self.hidden_ND[new], self.next_N[new] = hidden_TD, target_T
        some = slice(self.first, self.first + -(-(len(self) + T) // WHOLE_ROWS) * WHOLE_ROWS)
        return self.hidden_ND[some], self.next_N[some]

    # --- told

    def extend(self, hidden_TD: Tensor, token_T: Tensor, target_T: Tensor) -> None:
        """These positions are past."""
        size, T = self.how.cache_size, len(target_T)
        if not size:
            self._add(token_T.tolist())
        self._with_new(hidden_TD, target_T)
        self.end += T
        self.first = max(self.first, self.end - size) if size else 0

    def _move(self, coming: int) -> None:
        """To the front of buffers with room for more."""
        size, (hidden_ND, next_N) = self.how.cache_size, self.kept()
        room = most_positions(self.how, coming=coming) if size else 2 * (len(self) + coming) + WHOLE_ROWS
        self.hidden_ND, self.next_N = hidden_ND.new_zeros(room, hidden_ND.shape[1]), next_N.new_zeros(room)
        self.hidden_ND[: len(next_N)], self.next_N[: len(next_N)] = hidden_ND, next_N
        self.first, self.end = 0, len(next_N)

    def restored(self, hidden_ND: Tensor, next_N: Tensor, *, start: int) -> None:
        """What `kept` gave, and the token that was read first."""
        self.hidden_ND, self.next_N, self.end = hidden_ND, next_N, len(next_N)
        if not self.how.cache_size and len(next_N):
            self.end = 0
            self._add([start, *next_N[:-1].tolist()])
            self.end = len(next_N)

    # --- the index of a cache without end

    def _add(self, tokens: list[int]) -> None:
        if not self.tokens and tokens:
            self.start = tokens[0]
        for place, context in enumerate(self._contexts(tokens), start=self.end):
            places = self._index.setdefault(context, [])
            places.append(place)
            del places[:-CANDIDATES]
        self.tokens = [*self.tokens, *tokens][-self.how.cache_context :]

    def _contexts(self, tokens: Iterable[int]) -> list[tuple[int, ...]]:
        """What each of these was read after, and itself."""
        known, length = len(self.tokens), self.how.cache_context
        row = [*self.tokens, *tokens]
        return [tuple(row[max(0, end - length) : end]) for end in range(known + 1, len(row) + 1)]

    def _candidates(self, tokens: list[int]) -> Tensor:
        """Of each position the newest places with its context, also among the positions before it that come with it; -1 where there are fewer."""
        new: dict[tuple[int, ...], list[int]] = {}
        rows = []
        for place, context in enumerate(self._contexts(tokens), start=self.end):
            ours = new.setdefault(context, [])
            rows.append([*self._index.get(context, ()), *ours][-CANDIDATES:])
            ours.append(place)
        width = max(1, *map(len, rows))
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows])
