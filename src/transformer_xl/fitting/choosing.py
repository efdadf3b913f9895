"""Which tokens, and which model, for this text, this machine and this time. Knows what was measured to be good: docs/experiments.md."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformer_xl.config import ModelConfig, RunConfig
from transformer_xl.data.store import Store
from transformer_xl.devices import choose_device
from transformer_xl.fitting.looking import Findings
from transformer_xl.presets.preset import sized
from transformer_xl.training.clock import seconds_of_a_step
from transformer_xl.training.loop import settled

PAIRS_FROM = 300_000
"""Bytes of text from which on byte pairs are learned: of less there are too few of each."""
VOCABULARIES = ((0, 1024), (2_000_000, 2048), (6_000_000, 4096))
"""(bytes of text, byte pairs): the more text, the more of them are seen often enough."""
SIZES: tuple[tuple[float, dict[str, int]], ...] = (
    (0, {"n_layer": 2, "d_model": 192, "n_head": 6, "d_inner": 768}),
    (6e6, {"n_layer": 3, "d_model": 256, "n_head": 8, "d_inner": 1024}),
    (30e6, {"n_layer": 4, "d_model": 384, "n_head": 12, "d_inner": 1536}),
)
"""(tokens that the smallest reads in the time, shape): docs/experiments.md has what was measured."""
DROPOUTS = ((0, 0.0), (3, 0.1), (8, 0.2), (25, 0.3))
"""(times that the text is read, dropout)."""
TABLES_BELOW = 1.0
"""Times that a text is read. Tables of runs of tokens learn it sooner; read again, they know it by heart, and nothing else."""
TABLES: dict[str, dict[str, Any]] = {
    "byte": {"ngrams": (2, 3, 4, 5), "ngram_rows": 1 << 16, "d_ngram": 16},
    "bpe": {"ngrams": (2, 3), "ngram_rows": 1 << 16, "d_ngram": 32},
}
NO_TABLES: dict[str, Any] = {"ngrams": (), "ngram_rows": 0, "d_ngram": 0}
DECAYS = ((0, 0.0), (1, 0.1))
"""The same for weight decay."""
RATES_OF_WEIGHTS = ((0, 1.0), (8, 0.3))
"""Of weights that exist, shares of the rate they were trained with: a text that is read again and again is otherwise soon known by heart."""
VALIDATIONS = ((0, 4), (2, 12))
"""How often it is asked how good the model is by now: a text that is read again and again may be known by heart before the time is over, and then the best
checkpoint is an earlier one."""
VALIDATION_SHARE = 0.03
"""Of the tokens that are trained on, which one such question reads at most; reading takes a third of the time of training."""
FEWEST_LANES = 4
MANY_FILES, LEAST_SMALL = 20, 0.2
"""So many small files, which together are at least that share of all, are split file by file."""


def choose_tokens(findings: Findings, origin: str | None = None) -> dict[str, Any]:
    """Tokenizer and splits, with reasons."""
    count, together = findings.small
    many = count >= MANY_FILES and together >= LEAST_SMALL * findings.bytes
    split_by = "file" if many else "share"
    splits = "whole files, by name" if many else "the end of it"
    size = None
    if origin is not None:
        why = f"those of {origin}, whose weights know no others"
    elif findings.is_text and findings.bytes >= PAIRS_FROM:
        size = largest_within(VOCABULARIES, findings.bytes)
        why = f"{size:,} byte pairs, learned from it: a step reads several bytes, and there is enough text to see each pair often"
    else:
        why = "single bytes: " + ("it is too little text for byte pairs" if findings.is_text else "it is no UTF-8 text")
    reasons = (f"tokens: {why}", f"held out: 5 % to choose by and 5 % to tell by, {splits}")
    return {
        "tokenizer": None if origin is not None else "byte" if size is None else "bpe",
        "vocabulary_size": size,
        "split_by": split_by,
        "reasons": reasons,
    }


def choose_model(
    store: Store, base: RunConfig, *, minutes: float, device: str, origin: str | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """What is trained in the end, and why. Times some real steps of the smallest; of a model that exists, its own, and leaves it its size."""
    base = _for_store(base, store)
    place = choose_device(device)
    a_step = seconds_of_a_step(settled(base, place), store=store, device=place)
    tokens = 60 * minutes * tokens_of_a_step(base) / a_step
    config = base if origin is not None else sized(base, **largest_within(SIZES, tokens))
    read_tokens, train = tokens * _numbers(base) / _numbers(config), len(store.split("train"))
    times = read_tokens / train
    dropout, decay = largest_within(DROPOUTS, times), largest_within(DECAYS, times)
    share = 1.0 if origin is None else largest_within(RATES_OF_WEIGHTS, times)
    rate = config.training.learning_rate * share
    training = replace(
        config.training,
        minutes=minutes,
        learning_rate=rate,
        weight_decay=decay,
        validate_every=_rounded(read_tokens / tokens_of_a_step(base) / largest_within(VALIDATIONS, times)),
        validation_tokens=min(config.training.validation_tokens, _rounded(VALIDATION_SHARE * read_tokens)),
    )
    config, told = replace(sized(config, dropout=dropout), training=training), ""
    if origin is None:
        kind = store.manifest.tokenizer_kind
        config = sized(config, **(TABLES[kind] if times < TABLES_BELOW else NO_TABLES))
        told = f", {'no ' * (times >= TABLES_BELOW)}tables of runs of tokens"
    elif share < 1:
        told = f", {share:.0%} of the rate that {origin} was trained with"
    often = f"{times:.1f} times" if times >= 1 else f"to {times:.0%}, spread over all of it"
    size = f"{config.model.n_layer} layers, {config.model.d_model} wide" + (f", as {origin} is" if origin else "")
    reasons = (
        f"size: {size}: {minutes:g} minutes read about {_in_millions(read_tokens)} tokens here",
        f"the text has {_in_millions(train)}, so it is read {often}: dropout {dropout:g}, weight decay {decay:g}{told}",
    )
    return config, reasons


def tokens_of_a_step(run: RunConfig) -> int:
    return run.training.lanes * run.training.segment


def _rounded(count: float) -> int:
    """To two digits, which is how well it is known; at least 1."""
    return max(1, round(float(f"{count:.2g}")))


def _in_millions(count: float) -> str:
    return f"{count / 1e6:.3g} million" if count >= 1e5 else f"{count:,.0f}"


def largest_within(rows: Sequence[tuple[float, Any]], value: float) -> Any:
    return [chosen for least, chosen in rows if value >= least][-1]


def _numbers(run: RunConfig) -> int:
    """What a token's cost grows with."""
    model = run.model
    assert isinstance(model, ModelConfig)
    return model.n_layer * model.numbers_of_a_layer + model.d_model * model.vocabulary


def _for_store(run: RunConfig, store: Store) -> RunConfig:
    """With its vocabulary, and lanes that find room in a short text."""
    training, tokens = run.training, len(store.split("train"))
    lanes, stretch = training.lanes, training.stretch
    while lanes > FEWEST_LANES and lanes * training.segment * 4 > tokens:
        lanes //= 2
    while stretch > 1 and stretch * lanes * training.segment > tokens:
        stretch //= 2
    run = replace(run, training=replace(training, lanes=lanes, stretch=stretch))
    return sized(run, vocabulary=store.manifest.vocabulary_size)
