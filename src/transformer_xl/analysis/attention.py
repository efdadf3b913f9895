"""What a model looks at (Appendix D): where each head looks on average, by which of the terms (a) to (d), and maps of single positions.

The text is read once, in segments with memory, every token seeing as many keys (`same_length`); only sums are kept, so nothing grows with it.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transformer_xl.analysis.terms import TOTAL, Scores, recording
from transformer_xl.config import EvaluationConfig
from transformer_xl.console import Advance
from transformer_xl.devices import to_device
from transformer_xl.errors import InputError
from transformer_xl.evaluation.scoring import Rule, make_rule, using_lengths, warm_up_tokens
from transformer_xl.model import TransformerXL

TOP_SHARE = 0.2
"""How many of the keys that a query sees are marked, as in the paper's figures."""

Tokens = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]
Head = tuple[int, int]
"""Layer and head, counted from 0; people count them from 1."""


@dataclass(frozen=True, kw_only=True)
class Width:
    """How widely one head looks."""

    mean_distance: float
    entropy_bits: float
    """How many keys share the attention, as a logarithm."""
    memory_share: float
    """How much of it lies in memory, before the query's segment."""


@dataclass(frozen=True, kw_only=True)
class Averages:
    """Where each head looks on average. Column r of the tables is distance r; distance 0 is the query's own token.

    Only queries that have a key at every distance count, each once: then every row is a mean of distributions over the same places and sums to
    one, where an average over "whoever has this distance" would give the nearest ones a bonus from the text's first tokens. With memory that
    leaves out the first R-1 tokens of the text; without, it keeps the last token of each whole segment.
    """

    rule: Rule
    queries: int
    average: dict[str, Floats]
    """[N, H, R] for `TOTAL` and for the softmax of each term alone."""
    entropy_bits_NH: Floats
    """Mean over the queries of the entropy of what each looks at: how many keys share it, as a logarithm; not the entropy of the average."""

    @property
    def span(self) -> int:
        """R, how many keys a query sees, its own token among them."""
        return int(self.average[TOTAL].shape[-1])

    @property
    def mean_distance(self) -> Floats:
        """[N, H], in tokens."""
        distances: Floats = self.average[TOTAL] @ np.arange(self.span, dtype=np.float64)
        return distances

    @property
    def memory_share(self) -> Floats:
        """[N, H]: how much of the attention lies before the query's segment."""
        share: Floats = self.average[TOTAL] @ self._before_segment()
        return share

    def _before_segment(self) -> Floats:
        """[R]: a key at distance r lies before the segment for the first r queries of each segment of T: min(r, T) of T. That is exact for the average
        over all ways to cut the text, and where each token sees as many keys the cut changes nothing else."""
        T = self.rule.segment
        return np.minimum(np.arange(self.span), T) / T if self.rule.memory else np.zeros(self.span)

    def width(self, head: Head) -> Width:
        return Width(
            mean_distance=float(self.mean_distance[head]),
            entropy_bits=float(self.entropy_bits_NH[head]),
            memory_share=float(self.memory_share[head]),
        )

    @property
    def uniform(self) -> Width:
        """What a head would have that looked everywhere alike."""
        return Width(
            mean_distance=(self.span - 1) / 2,
            entropy_bits=math.log2(self.span),
            memory_share=float(self._before_segment().mean()),
        )

    def widest(self) -> list[Head]:
        """All heads, by falling mean distance."""
        H = self.entropy_bits_NH.shape[1]
        order = np.argsort(-self.mean_distance, axis=None, kind="stable")
        return [divmod(int(place), H) for place in order]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one head looks at from one position. Positions count from 0."""

    position: int
    first_key: int
    """The position of the farthest key; the last is the query's own."""
    probability: dict[str, Floats]
    """For `TOTAL` and each term, oldest key first. Each sums to one (but for what an `initial_memory` of zeros takes at the text's start)."""
    score: dict[str, Floats]
    """Of each term, scaled: the softmax of their sum is what is looked at."""

    def top(self, term: str = TOTAL) -> list[int]:
        """Which keys, counted from the first, are among the `TOP_SHARE` that are looked at most."""
        return top_keys(self.probability[term])


@dataclass(frozen=True, kw_only=True)
class Map:
    """A few consecutive positions, the last of which was asked for, as one head sees them."""

    head: Head
    position: int
    rows: tuple[Row, ...]


def average_attention(
    model: TransformerXL, tokens: Tokens, *, lengths: EvaluationConfig, advance: Advance | None = None
) -> Averages:
    """Reads all `tokens`. Each sees its last `lengths.memory`, or, without memory, its segment; `lengths.same_length` is always taken as true.

    With memory the averages do not depend on `lengths.segment`, which then only sets how much is read at once.
    """
    rule = sight(model, lengths, tokens=len(tokens))
    N, H = model.config.n_layer, model.config.n_head
    with using_lengths(model, rule):
        span = span_of(model, rule)
        if len(tokens) < span:
            short = f"the text has {len(tokens):,} tokens, fewer than one segment of {span:,}, so there is nothing to average;"
            if rule.memory:
                full = f"a memory of {rule.memory:,} is full only from token {span:,} on, so nothing can be averaged"
                short = f"the text has {len(tokens):,} tokens, and {full}; take `memory={len(tokens) - 1}`, or"
            raise InputError(f"{short} give a longer text")
        sums: dict[str, Floats] = {}
        entropy_NH, queries, first = np.zeros((N, H)), 0, 0

        def record(layer: int, scores: Scores, probability_BHTR: Tensor) -> None:
            T = probability_BHTR.shape[2]
            if first >= T:
                return
            for term in (TOTAL, *scores.terms):
                full_BHTR = probability_BHTR[:, :, first:] if term == TOTAL else scores.probability(term, first=first)
                mean_HR = full_BHTR.mean((0, 2), dtype=torch.float64).flip(-1).cpu().numpy()
                sums.setdefault(term, np.zeros((N, H, span)))[layer] += (T - first) * mean_HR
            entropy_BHT = torch.special.entr(probability_BHTR[:, :, first:]).sum(-1)
            entropy_NH[layer] += entropy_BHT.sum((0, 2), dtype=torch.float64).cpu().numpy()

        memory = model.start_memory(1)
        with recording(model, span=span, record=record), torch.inference_mode():
            for start, segment_BT in _segments(model, tokens, rule=rule):
                T = segment_BT.shape[1]
                first = max(0, span - 1 - min(start, rule.memory))
                memory = model(segment_BT, memory=memory).memory
                queries += max(0, T - first)
                if advance is not None:
                    advance(T)
    return Averages(
        rule=rule,
        queries=queries,
        average={term: values_NHR / queries for term, values_NHR in sums.items()},
        entropy_bits_NH=entropy_NH / queries / math.log(2),
    )


def attention_maps(
    model: TransformerXL,
    tokens: Tokens,
    *,
    lengths: EvaluationConfig,
    heads: Sequence[Head],
    positions: Sequence[int],
    rows: int = 1,
) -> list[Map]:
    """For each head and position, `rows` consecutive queries ending there: exactly what reading the whole text would show.

    Reads only as far back as anything in the rows can reach, and keeps nothing but them.
    """
    pieces = attention_pieces(model, tokens, lengths=lengths, heads=heads, positions=positions, rows=rows)
    while True:
        try:
            next(pieces)
        except StopIteration as finished:
            maps: list[Map] = finished.value
            return maps


def attention_pieces(
    model: TransformerXL,
    tokens: Tokens,
    *,
    lengths: EvaluationConfig,
    heads: Sequence[Head],
    positions: Sequence[int],
    rows: int = 1,
) -> Generator[int, None, list[Map]]:
    """The same in pieces, for whoever has other things to do: yields how many tokens it has just read. In between, the model is as it was."""
    for head in heads:
        check_head(model, head)
    for position in positions:
        check_position(position, tokens=len(tokens))
    rule = sight(model, lengths, tokens=len(tokens))
    maps = []
    for position in positions:
        wanted = range(max(0, position - rows + 1), position + 1)
        found = yield from _rows(model, tokens, rule=rule, heads=heads, wanted=wanted)
        maps += [Map(head=head, position=position, rows=tuple(found[head])) for head in heads]
    return maps


def _rows(
    model: TransformerXL, tokens: Tokens, *, rule: Rule, heads: Sequence[Head], wanted: range
) -> Generator[int, None, dict[Head, list[Row]]]:
    found: dict[Head, list[Row]] = {head: [] for head in heads}
    # Whole segments, cut where a reading of all would cut them: absolute positions count from a segment's end.
    with using_lengths(model, rule):
        span, here, memory = span_of(model, rule), 0, model.start_memory(1)
        begin = max(0, wanted[0] // rule.segment * rule.segment - warm_up_tokens(model.config, segment=rule.segment))
    end = (wanted[-1] // rule.segment + 1) * rule.segment

    def record(layer: int, scores: Scores, probability_BHTR: Tensor) -> None:
        chosen = [head for head in found if head[0] == layer]
        queries = [position - here for position in wanted if 0 <= position - here < probability_BHTR.shape[2]]
        if not chosen or not queries:
            return
        alone = {term: scores.probability(term).expand_as(probability_BHTR) for term in scores.terms}
        by_term = {TOTAL: probability_BHTR, **alone}
        for head in chosen:
            for t in queries:
                before = here if rule.memory else 0  # without memory, a query knows nothing before its segment
                keys = min(span, before + t + 1)
                probability = {
                    term: value_BHTR[0, head[1], t, -keys:].double().cpu().numpy()
                    for term, value_BHTR in by_term.items()
                }
                score = {
                    term: value_BHTR.expand_as(probability_BHTR)[0, head[1], t, -keys:].double().cpu().numpy()
                    for term, value_BHTR in scores.terms.items()
                }
                first_key = here + t + 1 - keys
                row = Row(position=here + t, first_key=first_key, probability=probability, score=score)
                found[head].append(row)

    for start, segment_BT in _segments(model, tokens[:end], rule=rule, begin=begin):
        here = start
        with using_lengths(model, rule), recording(model, span=span, record=record), torch.inference_mode():
            memory = model(segment_BT, memory=memory).memory
        yield segment_BT.shape[1]
    return found


def _segments(model: TransformerXL, tokens: Tokens, *, rule: Rule, begin: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Where each segment starts, and its tokens."""
    device = model.vocabulary.bias_V.device
    for start in range(begin, len(tokens), rule.segment):
        segment = np.asarray(tokens[start : start + rule.segment], dtype=np.int64)
        yield start, to_device(torch.from_numpy(segment)[None], device)


def sight(model: TransformerXL, lengths: EvaluationConfig, *, tokens: int) -> Rule:
    """The rule under which a text is looked at: one lane, every token seeing as many keys where there is memory."""
    if tokens < 2:
        raise InputError(f"a text of {tokens} tokens has nothing to look back at; give at least two")
    return make_rule(model, replace(lengths, same_length=lengths.memory > 0), tokens=tokens, lanes=1)


def span_of(model: TransformerXL, rule: Rule) -> int:
    """R for a model that has the rule's lengths: M or M+1 keys by `same_length_keys`, or the segment where there is no memory."""
    visible = model.config.visible_distance
    return rule.segment if visible is None else visible + 1


def top_keys(probability: Floats) -> list[int]:
    """The fifth with the highest values; a key that is not looked at all (a zero, in single precision) is never among them."""
    most = math.ceil(TOP_SHARE * len(probability))
    return sorted(key for key in np.argsort(-probability, kind="stable")[:most].tolist() if probability[key] > 0)


def name_of(head: Head) -> str:
    """As people write it, counted from 1."""
    return f"{head[0] + 1}.{head[1] + 1}"


def check_head(model: TransformerXL, head: Head) -> None:
    N, H = model.config.n_layer, model.config.n_head
    if not (0 <= head[0] < N and 0 <= head[1] < H):
        raise InputError(
            f"no head {name_of(head)}: this model has layers 1 to {N} with heads 1 to {H}; write LAYER.HEAD, such as {N}.{H}"
        )


def check_position(position: int, *, tokens: int) -> None:
    if not 0 <= position < tokens:
        raise InputError(f"no token {position + 1} in a text of {tokens:,} tokens; they count from 1")


def widest_of_different_layers(averages: Averages, *, heads: int) -> list[Head]:
    """The paper's choice of what to look at closely: wide heads, no two of one layer, lowest layer first."""
    best: dict[int, Head] = {}
    for head in averages.widest():
        best.setdefault(head[0], head)
    return sorted(list(best.values())[:heads])


def random_position(averages: Averages, *, tokens: int, seed: int) -> int:
    """The paper's choice of where to look closely: any position that sees a full span and, where the text allows, has a next token to predict."""
    full = range(min(averages.span, tokens - 1) - 1, tokens - 1)
    if not averages.rule.memory:
        full = range(averages.rule.segment - 1, tokens, averages.rule.segment)
    return full[int(np.random.Generator(np.random.PCG64(seed)).integers(len(full)))]
