"""Learning while reading, way by way: one model per seed, each way tuned on valid and told on test, its time beside its gain. Beyond the paper."""

import math
import time
from dataclasses import asdict
from typing import Any

from transformer_xl.adaptation.evaluating import evaluate_adapting
from transformer_xl.adaptation.statistics import gather
from transformer_xl.adaptation.tuning import Tuning
from transformer_xl.config import AdaptationConfig
from transformer_xl.config.fields import override
from transformer_xl.data.store import Split, Store
from transformer_xl.errors import DataError
from transformer_xl.evaluation import make_rule
from transformer_xl.presets import find_preset
from transformer_xl.studies.ablation import XL
from transformer_xl.studies.report import Report, mean_and_spread
from transformer_xl.studies.runs import Setting, Trained, remembered, trained, variant_model

RULES: dict[str, AdaptationConfig] = {
    "sgd": AdaptationConfig(rule="sgd"),
    "rms": AdaptationConfig(rule="rms"),
    "adapters": AdaptationConfig(rule="sgd", learns="adapters", rank=4),
}
COMBINED = "rms"
WAYS = ("static", "cache", *RULES, "rms and cache")
SEGMENTS = 100
"""Of train, on which gradients are measured."""
VALID_TOKENS = 20_000


def run_adaptation(setting: Setting) -> Report:
    base = setting.scale.standard
    store = setting.store(base)
    if "valid" not in store.splits:
        raise DataError(
            f"{store.folder} has no valid split, on which every way is tuned; prepare one with {base.corpus}"
        )
    seeds = range(1, setting.seeds + 1)
    started_at = time.perf_counter()
    models = [
        trained(setting, variant_model(base, XL, store=store, seed=seed), store=store, seed=seed) for seed in seeds
    ]
    found = [_measured(setting, model, store=store) for model in models]
    rows = [_row(way, [one[way] for one in found], [one["static"] for one in found]) for way in WAYS]
    commands = [model.asked.command(data=store.folder, run=model.folder, device=setting.device) for model in models]
    return Report(
        title="Learning while reading (beyond the paper)",
        corpus=f"Corpus: {store.manifest.name} ({store.manifest.rule}).",
        rows=rows,
        notes=(
            f"rate and decay, theta and lambda: each way by itself, on the first {VALID_TOKENS:,} tokens of valid at most; told on test",
            "a token is scored before anything learns from it; one lane, from the first token to the last",
            "time: of the whole test text, over that of weights that stand still, in one lane; whatever else the machine did",
            "gain: bits per token of test, less those of the same model where nothing learns; where it is negative, learning hurts",
        ),
        commands=[("The models", commands)],
        seconds=sum(model.seconds for model in models) + time.perf_counter() - started_at,
        values={"ways": {way: [one[way] for one in found] for way in WAYS}},
    )


def _measured(setting: Setting, model: Trained, *, store: Store) -> dict[str, Any]:
    valid, test = store.split("valid").first(min(VALID_TOKENS, len(store.split("valid")))), setting.test(store)
    key = {
        "valid": len(valid),
        "test": len(test),
        "segments": SEGMENTS,
        "rules": {n: asdict(h) for n, h in RULES.items()},
    }
    return remembered(
        model.folder,
        "adaptation",
        key=key,
        compute=lambda: _compared(setting, model, store.split("train"), valid, test),
    )


def _compared(setting: Setting, model: Trained, train: Split, valid: Split, test: Split) -> dict[str, Any]:
    checkpoint, base = model.load(device=setting.device), setting.scale.standard
    net = checkpoint.model.eval()
    lengths = override(find_preset(base.preset).run, base.words).evaluation
    rule = make_rule(net, lengths, tokens=len(test), lanes=1)
    segments = min(SEGMENTS, max(1, (len(train) - 1) // rule.segment))
    ranks = {how.rank for how in RULES.values() if how.learns == "adapters"}
    statistics = gather(net, train, segment=rule.segment, segments=segments, rank=max(ranks))
    chosen = {"static": AdaptationConfig()}
    for name, start in RULES.items():
        tuned = Tuning(net, valid, rule=rule, statistics=statistics).tune(start, corpus="")
        chosen[name] = tuned.gradient.how
        if name == COMBINED:
            chosen |= {"cache": tuned.cache.how, "rms and cache": tuned.both.how}
    found: dict[str, Any] = {}
    for name in WAYS:
        told = evaluate_adapting(net, test, chosen[name], rule=rule, statistics=statistics)
        found[name] = {"nats": told.loss_nats, "seconds": told.seconds, "how": chosen[name].sentence()}
    return found


def _row(way: str, found: list[dict[str, Any]], static: list[dict[str, Any]]) -> dict[str, str]:
    pairs = list(zip(found, static, strict=True))
    return {
        "way": way,
        "bits per token": mean_and_spread([one["nats"] / math.log(2) for one in found], digits=4),
        "fewer bits, %": mean_and_spread([100 * (1 - one["nats"] / still["nats"]) for one, still in pairs], digits=2),
        "less perplexity, %": mean_and_spread(
            [100 * (1 - math.exp(one["nats"] - still["nats"])) for one, still in pairs], digits=2
        ),
        "time over static": mean_and_spread([one["seconds"] / still["seconds"] for one, still in pairs], digits=2),
    }
