"""How good a model is on a split where it learns while it reads: each token's loss, in order. One lane from the first token to the last, for what was learned
is carried on.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from transformer_xl.adaptation.reader import AdaptiveReader
from transformer_xl.adaptation.statistics import Statistics
from transformer_xl.config import AdaptationConfig
from transformer_xl.console import Advance
from transformer_xl.data.store import Split
from transformer_xl.errors import ConfigError, DataError
from transformer_xl.evaluation.scoring import Figures, Losses, Rule, figures, score_split, using_lengths
from transformer_xl.model import AnyModel


def adaptive_rule(rule: Rule, how: AdaptationConfig) -> tuple[Rule, AdaptationConfig]:
    """The same rule, read in one lane while learning; and how, with its segment filled in."""
    if not (how.moves or how.caches):
        return rule, how
    if rule.name != "exact":
        raise ConfigError(
            f"adapt: the rule {rule.name} reads a text in pieces, each begun anew; learning goes with the rule exact"
        )
    if rule.weights != "exact":
        raise ConfigError(
            f"adapt: weights that learn are read as they are, not rounded to {rule.weights}; take `weights=exact`"
        )
    how = how.in_segments(rule.segment)
    if how.moves and rule.precision != "float32":
        raise ConfigError(
            f"adapt: weights that learn are read in float32, not in {rule.precision}; take `precision=float32`"
        )
    return replace(rule, lanes=1, segment=how.segment if how.moves else rule.segment, adaptation=how.sentence()), how


def score_adapting(
    model: AnyModel,
    split: Split,
    how: AdaptationConfig,
    *,
    rule: Rule,
    statistics: Statistics | None = None,
    advance: Advance | None = None,
) -> Losses:
    """Each token's loss in nats at its place in the split, as it was before anything learned from it; NaN for the first. Where nothing learns: the static
    figures, by the static path."""
    if not (how.moves or how.caches):
        return score_split(model, split, rule=rule, advance=advance)
    if split.sentence_mark is not None:
        raise DataError(
            f"{split.name} is made of sentences without order, in which there is nothing to adapt to; evaluate it without `adapt=`"
        )
    with using_lengths(model, rule):
        reader = AdaptiveReader(model, how, statistics=statistics, sight="segment")
        return read_through(reader, split, segment=rule.segment, advance=advance)


def evaluate_adapting(
    model: AnyModel,
    split: Split,
    how: AdaptationConfig,
    *,
    rule: Rule,
    statistics: Statistics | None = None,
    advance: Advance | None = None,
) -> Figures:
    started_at = time.perf_counter()
    rule, how = adaptive_rule(rule, how)
    losses = score_adapting(model, split, how, rule=rule, statistics=statistics, advance=advance)
    return figures(losses, split=split, rule=rule, seconds=time.perf_counter() - started_at)


def read_through(reader: AdaptiveReader, split: Split, *, segment: int, advance: Advance | None = None) -> Losses:
    losses = np.full(len(split), np.nan, dtype=np.float32)
    device = reader.model.vocabulary.bias_V.device
    for place in _pieces(len(split), segment=segment, first=segment + reader.how.moves):
        row_1T = torch.from_numpy(np.asarray(split.tokens[place], dtype=np.int64))[None].to(device)
        losses[place] = reader.score(row_1T)[0].float().cpu().numpy()
        if advance:
            advance(place.stop - place.start - (place.start == 0))
    return losses


def _pieces(tokens: int, *, segment: int, first: int) -> Iterator[slice]:
    """As they are read and learned from in one go: a segment is whole once the token after it is there."""
    yield slice(0, min(first, tokens))
    for start in range(first, tokens, segment):
        yield slice(start, min(start + segment, tokens))
