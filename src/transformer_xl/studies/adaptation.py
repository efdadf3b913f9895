"""Learning while reading, way by way: one model per seed, each way tuned on valid and told on test, its time beside its gain. Beyond the paper.

A text of another kind (`shift`) is read as well, with the settings of the text that was trained on: nobody knows beforehand what will come.
"""

import math
import time
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.adaptation.evaluating import adaptive_rule, score_adapting
from transformer_xl.adaptation.statistics import Statistics, gather
from transformer_xl.adaptation.tuning import Tuning
from transformer_xl.config import AdaptationConfig
from transformer_xl.data.store import Split, Store, open_store
from transformer_xl.data.text.tokenizers import Tokenizer
from transformer_xl.errors import DataError, InputError
from transformer_xl.evaluation import UNIT_NAMES, make_rule
from transformer_xl.evaluation.references import text_of
from transformer_xl.evaluation.scoring import Rule
from transformer_xl.model import AnyModel
from transformer_xl.pictures import draw_lines
from transformer_xl.studies.intervals import Effect, Means, block_means, effect_of
from transformer_xl.studies.report import Report
from transformer_xl.studies.runs import Setting, Trained, remembered, trained, variant_model
from transformer_xl.studies.tables import XL

RULES: dict[str, AdaptationConfig] = {
    "sgd": AdaptationConfig(rule="sgd"),
    "rms": AdaptationConfig(rule="rms"),
    "adapters": AdaptationConfig(rule="sgd", learns="adapters", rank=4),
}
COMBINED = "rms"
WAYS = ("static", "cache", *RULES, "rms and cache")
SEGMENTS = 100
"""Of train, on which gradients are measured."""
VALID_TOKENS = 10_000

Found = dict[str, Any]
"""Of one way on one text: seconds, how, and the mean loss of each block."""


def run_adaptation(setting: Setting) -> Report:
    scale = setting.scale
    store = setting.store(scale.reading)
    words = store.manifest.unit == "perplexity_per_word"
    base = scale.reading_words if words else scale.reading
    if "valid" not in store.splits:
        raise DataError(
            f"{store.folder} has no valid split, on which every way is tuned; prepare one with {base.corpus}"
        )
    texts = {"test": setting.test(store)}
    if setting.shift is not None:
        texts["shift"] = shifted(open_store(setting.shift), store, tokens=len(texts["test"]))
    started_at = time.perf_counter()
    models = [
        trained(setting, variant_model(base, XL, store=store, seed=seed), store=store, seed=seed)
        for seed in range(1, setting.seeds + 1)
    ]
    found = [_measured(setting, model, store=store, texts=texts) for model in models]
    rows = [_row(text, way, found, unit=store.manifest.unit) for text in texts for way in WAYS]
    commands = [model.asked.command(data=store.folder, run=model.folder, device=setting.device) for model in models]
    return Report(
        title="Learning while reading (beyond the paper)",
        corpus=f"Corpus: {store.manifest.name} ({store.manifest.rule}); the first {len(texts['test']):,} tokens of its test split.",
        caveat="Small models, trained for minutes: what a better model gains may be less.",
        rows=rows,
        notes=[
            f"rate and decay, theta and lambda: each way by itself, on the first {VALID_TOKENS:,} tokens of valid at most; told on test",
            "a token is scored before anything learns from it; one lane, from the first token to the last; every way, nothing learning too, in segments as"
            " long as a lesson",
            f"gains: of the mean over {setting.seeds} seeds, and in brackets what 95 of 100 draws of seeds and of places in the text lie within; beside the same"
            " models where nothing learns; where they are negative, learning hurts",
            "time: over that of weights that stand still, in one lane; whatever else the machine did (txl bench adaptation takes turns)",
            *_about_the_shift(setting, texts),
        ],
        commands=[("The models", commands)],
        pictures=_drawn(setting, found, texts),
        seconds=sum(model.seconds for model in models) + time.perf_counter() - started_at,
        values={
            "unit": store.manifest.unit,
            "texts": {text: {way: [one[text][way] for one in found] for way in WAYS} for text in texts},
        },
    )


def shifted(other: Store, store: Store, *, tokens: int) -> Split:
    """The beginning of another store's test text in the tokens of this one; bytes that this one has no token for are left out."""
    if "test" not in other.splits:
        raise DataError(f"{other.folder} has no test split, which would be read; prepare one")
    data, tokenizer = text_of(other, "test", first=2 * tokens), store.tokenizer
    known = [value for value in np.unique(data) if _is_known(tokenizer, int(value))]
    kept = data[np.isin(data, known)].tobytes()
    read = copy(store.split("test"))
    read.name = "test text of another kind"
    read.tokens = tokenizer.encode(kept)[:tokens]
    read.document_starts = read.document_starts[:0]
    if len(read.tokens) < 2:
        raise DataError(f"{other.folder}: nothing of its test text can be read in the tokens of {store.folder}")
    read.bytes = len(tokenizer.decode_bytes(read.tokens))
    read.characters = read.bytes
    return read


def _is_known(tokenizer: Tokenizer, value: int) -> bool:
    try:
        return len(tokenizer.encode(bytes([value]))) > 0
    except DataError:
        return False


def _measured(
    setting: Setting, model: Trained, *, store: Store, texts: Mapping[str, Split]
) -> dict[str, dict[str, Found]]:
    valid = store.split("valid").first(min(VALID_TOKENS, len(store.split("valid"))))
    key = {
        "valid": len(valid),
        "texts": {
            name: [len(split), int(np.asarray(split.tokens, dtype=np.int64).sum())] for name, split in texts.items()
        },
        "segments": SEGMENTS,
        "lesson": AdaptationConfig().in_segments(model.asked.config.evaluation.segment).segment,
        "evaluation": asdict(model.asked.config.evaluation),
        "rules": {name: asdict(how) for name, how in RULES.items()},
    }
    return remembered(
        model.folder,
        "adaptation",
        key=key,
        compute=lambda: _compared(setting, model, store.split("train"), valid, texts),
    )


def _compared(
    setting: Setting, model: Trained, train: Split, valid: Split, texts: Mapping[str, Split]
) -> dict[str, dict[str, Found]]:
    net = model.load(device=setting.device).model.eval()
    rule = make_rule(net, model.asked.config.evaluation, tokens=len(texts["test"]), lanes=1)
    lesson = AdaptationConfig().in_segments(rule.segment).segment
    # Weights that stand still are read in segments as long as a lesson, too: a token then sees as much, and what is gained is gained by learning.
    rule = replace(rule, segment=lesson)
    segments = min(SEGMENTS, max(1, (len(train) - 1) // lesson))
    ranks = {how.rank for how in RULES.values() if how.learns == "adapters"}
    statistics = gather(net, train, segment=lesson, segments=segments, rank=max(ranks))
    chosen = {"static": AdaptationConfig()}
    for name, start in RULES.items():
        tuned = Tuning(net, valid, rule=rule, statistics=statistics).tune(replace(start, segment=lesson), corpus="")
        chosen[name] = tuned.gradient.how
        if name == COMBINED:
            chosen |= {"cache": tuned.cache.how, "rms and cache": tuned.both.how}
    return {
        text: {way: _told(net, split, chosen[way], rule=rule, statistics=statistics) for way in WAYS}
        for text, split in texts.items()
    }


def _told(net: AnyModel, split: Split, how: AdaptationConfig, *, rule: Rule, statistics: Statistics) -> Found:
    started_at = time.perf_counter()
    rule, how = adaptive_rule(rule, how)
    strayed = ""
    try:
        losses = score_adapting(net, split, how, rule=rule, statistics=statistics)
    except InputError:  # settings that were good on valid, where nobody may choose again
        losses = np.full(len(split), math.log(net.config.vocabulary), dtype=np.float32)
        losses[0], strayed = np.nan, "; its weights strayed, and every token counts as a guess among all"
    return {
        "nats": float(np.nanmean(losses, dtype=np.float64)),
        "seconds": time.perf_counter() - started_at,
        "how": how.sentence() + strayed,
        "blocks": block_means(losses),
    }


# --- telling


def fewer_bits(still: Means, learning: Means) -> Means:
    return 100 * (1 - learning / still)


def less_perplexity(still: Means, learning: Means) -> Means:
    return 100 * (1 - np.exp(learning - still))


def gain(found: list[dict[str, dict[str, Found]]], text: str, way: str, *, unit: str) -> Effect:
    """In percent: of perplexity where tokens are words, of bits elsewhere."""
    effect = less_perplexity if unit == "perplexity_per_word" else fewer_bits
    still, ours = ([one[text][each]["blocks"] for one in found] for each in ("static", way))
    return effect_of(still, ours, effect, paired=True)


def _row(text: str, way: str, found: list[dict[str, dict[str, Found]]], *, unit: str) -> dict[str, str]:
    ours, still = ([one[text][each] for one in found] for each in (way, "static"))
    words = unit == "perplexity_per_word"
    values = [math.exp(one["nats"]) if words else one["nats"] / math.log(2) for one in ours]
    ratios = [one["seconds"] / other["seconds"] for one, other in zip(ours, still, strict=True)]
    return {
        "read": text,
        "way": way,
        UNIT_NAMES[unit] if words else "bits per token": ", ".join(
            f"{value:.{2 if words else 3}f}" for value in values
        ),
        f"{'less perplexity' if words else 'fewer bits'}, %": ""
        if way == "static"
        else gain(found, text, way, unit=unit).shown(1),
        "time over static": f"{sum(ratios) / len(ratios):.1f}",
        "settings of the first seed": ours[0]["how"] or "-",
    }


def _about_the_shift(setting: Setting, texts: Mapping[str, Split]) -> list[str]:
    if "shift" not in texts:
        return []
    return [
        f"shift: the first {len(texts['shift']):,} tokens of the test text of {setting.shift}, with the settings that were chosen on the text that was trained on;"
        " what has no token there is left out"
    ]


def _drawn(setting: Setting, found: list[dict[str, dict[str, Found]]], texts: Mapping[str, Split]) -> list[Path]:
    """Bits along the text: the mean over seeds of each block."""
    paths: list[Path] = []
    for text, split in texts.items():
        lines = {}
        for way in WAYS:
            mean_K = np.mean([one[text][way]["blocks"] for one in found], axis=0) / math.log(2)
            places = (np.arange(len(mean_K)) + 0.5) * len(split) / len(mean_K)
            lines[way] = (places, mean_K, "k-" if way == "static" else "-")
        title = "Learning while reading" + (": a text of another kind" if text == "shift" else "")
        name = "" if text == "test" else f"-{text}"
        paths += draw_lines(setting.place(f"{name}.png"), lines, title=title, x="tokens read", y="bits per token")
    return paths
