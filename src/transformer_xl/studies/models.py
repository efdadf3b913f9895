"""Which models a study trains: a base, which is a preset with differences, and variants, which are differences from the base. No torch, no data."""

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from transformer_xl.config import ModelConfig, RunConfig
from transformer_xl.config.model import ENCODINGS_WITHOUT_MEMORY, Encoding
from transformer_xl.config.sources import resolve
from transformer_xl.devices import choose_device
from transformer_xl.errors import DataError
from transformer_xl.presets import find_preset


@dataclass(frozen=True, kw_only=True)
class Base:
    """The Transformer-XL of a scale, that everything else is a difference from."""

    name: str
    """First word of the names of its runs."""
    corpus: str
    """What it is meant to be trained on."""
    preset: str
    words: dict[str, str] = field(default_factory=dict)
    """Dotted fields that differ from the preset, as typed on the command line."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model as a difference from its base."""

    name: str
    """Of its run: what the model is, not which study asks for it, so that studies share it."""
    recurrence: bool = True
    encoding: Encoding = "relative"
    half_loss: bool = False
    """Scored on the recent half of what is fed: as many tokens are fed."""
    length: float = 1.0
    """Tokens fed at once, over those of the base."""
    steps: int = 1
    """Of training, over those of the base."""

    @property
    def loss(self) -> str:
        return "half" if self.half_loss else "full"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One model to train: its configuration, and the words that make it."""

    name: str
    preset: str
    words: dict[str, str]
    config: RunConfig

    def command(self, *, data: object, run: object, device: str) -> str:
        options = [word for name, value in self.words.items() for word in (f"--{name}", value)]
        start = ["txl", "train", self.preset, "--data", str(data), "--run", str(run)]
        return shlex.join([*start, *options, *on_device(device)])


def on_device(device: str) -> list[str]:
    """Words for another device than a command would choose by itself."""
    return [] if device == str(choose_device()) else ["--device", device]


def asked_model(base: Base, variant: Variant | str, *, corpus: str, vocabulary: int, seed: int) -> Asked:
    """A variant of `base` for a corpus of this name and vocabulary; runs are called by all of these. In place of a variant, only its name: the base
    as it is, for models that are no variants of a Transformer-XL."""
    start = find_preset(base.preset).run
    cutoffs = start.model.cutoffs
    if cutoffs and cutoffs[-1] >= vocabulary:
        raise DataError(
            f"{corpus} has a vocabulary of {vocabulary:,}, too small for the preset {base.preset}, whose softmax is cut at {cutoffs[-1]:,};"
            f" give a larger corpus, such as {base.corpus}"
        )
    name, words = variant, dict(base.words)
    if isinstance(variant, Variant):
        config = resolve(start, vocabulary=vocabulary, files=[], words=base.words)
        name, words = variant.name, words | variant_words(variant, config)
    words["training.seed"] = str(seed)
    config = resolve(start, vocabulary=vocabulary, files=[], words=words)
    run = f"{base.name}-{in_a_name(corpus)}-{name}-seed-{seed}"
    return Asked(name=run, preset=base.preset, words=words, config=config)


def transformer(config: RunConfig) -> ModelConfig:
    """The model of a configuration that is known to be no recurrent network."""
    assert isinstance(config.model, ModelConfig)
    return config.model


def variant_words(variant: Variant, base: RunConfig) -> dict[str, str]:
    """The fields in which the variant differs from its base."""
    fed = round(base.training.segment * variant.length)
    memory = transformer(base).memory if variant.recurrence else 0
    learned = {"shaw": memory + fed, "per_layer": fed}.get(variant.encoding, 0)
    model = {"memory": memory, "encoding": variant.encoding, "learned_positions": learned}
    context = fed // 2 if variant.half_loss else 0
    training = {"segment": fed - context, "context": context, "steps": variant.steps * base.training.steps}
    # What `txl evaluate` then does is the figure "as in training": a model trained without memory is given one as long as its segment.
    remembers = variant.encoding not in ENCODINGS_WITHOUT_MEMORY
    evaluation = {
        "segment": fed,
        "memory": (memory or fed) if remembers else 0,
        "clamp_len": 0,
        "same_length": remembers and not memory,
    }
    parts: list[tuple[str, Any, dict[str, Any]]] = [
        ("model", base.model, model),
        ("training", base.training, training),
        ("evaluation", base.evaluation, evaluation),
    ]
    return {
        f"{part}.{name}": str(value).lower()
        for part, there, here in parts
        for name, value in here.items()
        if getattr(there, name) != value
    }


def in_a_name(corpus: str) -> str:
    """The corpus's name as part of a folder's."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", corpus).strip("-.") or "text"
