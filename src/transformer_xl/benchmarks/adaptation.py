"""What learning while reading costs: every way reads the same tokens once in each round, beside the weights that stand still. Weights and text are random:
the n-th token is as frequent as the n-th word of a language, and passages return, so that a cache without end has as much to look at as it may.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

import torch

from transformer_xl.adaptation import AdaptiveReader, Statistics
from transformer_xl.adaptation.fast_weights import FastWeights
from transformer_xl.config import AdaptationConfig, ModelConfig
from transformer_xl.console import progress
from transformer_xl.errors import ConfigError, InputError
from transformer_xl.model import TransformerXL
from transformer_xl.presets import find_preset
from transformer_xl.training.recording import peak_memory_mb

Scale = Literal["full", "tiny"]
STATIC = "weights that stand still"
SEGMENT = {"full": 128, "tiny": 16}
"""Of the model that is measured unless a preset is named, which brings its own."""
SEGMENTS = {"full": 64, "tiny": 4}
"""That each reads in a round."""
PASSAGE, PASSAGES = 32, 8
"""Tokens of each passage, and how many there are."""
PARTS = 10


@dataclass(frozen=True, kw_only=True)
class Cost:
    way: str
    tokens_per_second: float
    """Median over the rounds."""
    ratio_to_static: float
    """Median of the ratios of the rounds: both were measured one after the other."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Of one long text that is read while learning."""

    tokens: int
    tokens_per_second: float
    peak_memory_mb: float
    """Of the process, so far."""


@dataclass(frozen=True, kw_only=True)
class AdaptationCosts:
    model: str
    segment: int
    """That is read where weights stand still."""
    lesson: int
    """Tokens between two moves."""
    rounds: int
    scale: Scale
    costs: tuple[Cost, ...]
    parts: tuple[Part, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_adaptation(
    *, scale: Scale, rounds: int, tokens: int | None = None, preset: str | None = None
) -> AdaptationCosts:
    """`tokens`: of a text that is read on, with moving weights and a cache, to see whether time and memory stay flat."""
    model, segment = _model(scale, preset)
    ways = ways_of(scale, segment=segment)
    lesson = ways["both"].segment
    if tokens is not None and tokens < PARTS * lesson:
        raise ConfigError(f"`tokens=`: {tokens} are too few to compare parts of; take at least {PARTS * lesson}")
    count = SEGMENTS[scale] * segment
    statistics = _statistics(model)
    readers = {way: AdaptiveReader(model, how, statistics=statistics, sight="segment") for way, how in ways.items()}
    text_1P = _text(model, tokens=count, seed=0)
    _check_same(readers[STATIC].fork(), model, text_1P[:, : 3 * segment], segment=segment)
    for reader in readers.values():
        reader.score(text_1P[:, :1])  # a segment is whole with the token after it: from here on, with its last piece
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with progress("reading", total=(rounds + 1) * len(ways), unit="texts") as advance:
        for number in range(rounds + 1):
            for way, reader in readers.items():
                spent = _seconds(reader, text_1P, segment=reader.how.segment or segment)
                if number:  # the first fills memory and caches
                    seconds[way].append(spent)
                advance(1)
    parts = tuple(_parts(readers["both"], tokens, segment=lesson)) if tokens else ()
    costs = [
        Cost(
            way=way,
            tokens_per_second=count / median(spent),
            ratio_to_static=median(own / still for own, still in zip(spent, seconds[STATIC], strict=True)),
        )
        for way, spent in seconds.items()
    ]
    config = model.config
    told = "" if preset is None else f"{preset}: "
    told += f"{config.n_layer} layers of {config.d_model}, memory {config.memory}, {config.vocabulary:,} tokens"
    told_apart: dict[str, Any] = {"segment": segment, "lesson": lesson, "rounds": rounds, "scale": scale}
    return AdaptationCosts(model=told, **told_apart, costs=tuple(costs), parts=parts)


def ways_of(scale: Scale, *, segment: int) -> dict[str, AdaptationConfig]:
    size = 2000 if scale == "full" else 20
    moves: dict[str, Any] = {
        "rate": 1e-9,
        "segment": AdaptationConfig().in_segments(segment).segment,
        "cache_size": size,
    }
    cache: dict[str, Any] = {"cache_lambda": 0.1, "cache_size": size}
    return {
        STATIC: AdaptationConfig(),
        "cache": AdaptationConfig(**cache),
        "cache without end": AdaptationConfig(cache_lambda=0.1, cache_size=0),
        "sgd": AdaptationConfig(**moves),
        "rms with decay": AdaptationConfig(**moves, rule="rms", decay=1e-3),
        "adapters": AdaptationConfig(**moves, learns="adapters", rank=8 if scale == "full" else 2),
        "both": AdaptationConfig(**{**moves, **cache}, rule="rms", decay=1e-3),
    }


def _model(scale: Scale, preset: str | None) -> tuple[TransformerXL, int]:
    """And the segment that it is read in."""
    run, segment = find_preset(preset or "tiny-byte").run, SEGMENT[scale]
    config, lengths = run.model, run.evaluation
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"`preset=`: {preset} is no Transformer-XL, and not all that is measured can learn in it")
    if preset is not None:
        config, segment = replace(config, memory=lengths.memory or config.memory), lengths.segment
    elif scale == "tiny":
        config = ModelConfig(vocabulary=32, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32, memory=8)
    torch.manual_seed(0)
    return TransformerXL(config).eval(), segment


def _text(model: TransformerXL, *, tokens: int, seed: int) -> torch.Tensor:
    """The same few passages whatever the seed, in an order of its own."""
    made, order = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    frequency_V = 1 / torch.arange(1, model.config.vocabulary + 1)
    passages = frequency_V.expand(PASSAGES, -1).multinomial(PASSAGE, replacement=True, generator=made)
    chosen = torch.randint(PASSAGES, (-(-tokens // PASSAGE),), generator=order)
    return passages[chosen].flatten()[None, :tokens]


def _statistics(model: TransformerXL) -> Statistics:
    fast = FastWeights(model, AdaptationConfig())
    sizes = {name: torch.ones_like(weight) for name, weight in zip(fast.names, fast.trained, strict=True)}
    return Statistics(segment=1, tokens=1, rank=0, sizes=sizes)


def _seconds(reader: AdaptiveReader, text_1P: torch.Tensor, *, segment: int) -> float:
    started_at = time.perf_counter()
    for start in range(0, text_1P.shape[1], segment):
        reader.score(text_1P[:, start : start + segment])
    return time.perf_counter() - started_at


def _check_same(static: AdaptiveReader, model: TransformerXL, text_1P: torch.Tensor, *, segment: int) -> None:
    """Weights that hardly move read as those that stand still."""
    moving = AdaptiveReader(model, AdaptationConfig(rate=1e-30, segment=segment))
    cut = range(0, text_1P.shape[1], segment)
    by_segment = torch.cat([static.score(text_1P[:, start : start + segment]) for start in cut], dim=1)
    if not torch.allclose(moving.score(text_1P)[:, 1:], by_segment[:, 1:], rtol=0, atol=1e-3):
        raise InputError(
            "the two ways to read do not compute the same here, and comparing their speed would mean nothing"
        )


def _parts(reader: AdaptiveReader, tokens: int, *, segment: int) -> Iterator[Part]:
    each = tokens // PARTS // segment * segment
    with progress("reading on", total=PARTS * each, unit="tokens") as advance:
        for number in range(PARTS):
            spent = _seconds(reader, _text(reader.model, tokens=each, seed=number + 1), segment=segment)  # type: ignore[arg-type]
            advance(each)
            yield Part(
                tokens=(number + 1) * each,
                tokens_per_second=each / spent,
                peak_memory_mb=peak_memory_mb(torch.device("cpu")),
            )
