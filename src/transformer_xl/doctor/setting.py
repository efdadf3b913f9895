"""What a check is given, and what it gives back."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from transformer_xl.config import DROPOUT_SITES, EvaluationConfig, ModelConfig, RunConfig, TrainingConfig
from transformer_xl.data.corpora.own_text import OwnText, prepare_own_text
from transformer_xl.data.store import Store
from transformer_xl.model import TransformerXL
from transformer_xl.presets import PRESETS

Status = Literal["ok", "failed", "skipped"]
ISSUE = "paste the JSON below into an issue: this is a mistake of ours, or one of torch or the driver that we should know of"


@dataclass(frozen=True, kw_only=True)
class Result:
    name: str = ""
    status: Status
    figure: str
    """A few words for the table."""
    sentence: str = ""
    """What was found, where it is not what it should be, or why nothing was looked at."""
    remedy: str = ""
    """What to do about it."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """For programs; numbers and words alone."""
    said: tuple[str, ...] = ()
    """Lines that were for people."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    device: torch.device
    presets: tuple[str, ...]
    """Whose shapes are looked at."""
    folder: Path
    """For what checks write; it goes when they are done."""

    @cached_property
    def recurrent(self) -> list[str]:
        return [preset.name for preset in PRESETS if preset.name in self.presets and preset.run.model.recurrent]

    @cached_property
    def models(self) -> dict[str, ModelConfig]:
        """Of the presets, those that attend."""
        return {
            preset.name: preset.run.model
            for preset in PRESETS
            if preset.name in self.presets and isinstance(preset.run.model, ModelConfig)
        }

    @cached_property
    def store(self) -> Store:
        """Bytes of our own source, which is there wherever we are."""
        text = self.folder / "text"
        text.mkdir()
        for path in sorted((Path(__file__).parents[1] / "model").glob("*.py")):
            shutil.copy(path, text / path.name)
        return prepare_own_text([text], out=self.folder / "store", settings=OwnText(tokenizer="byte"))


Check = Callable[[Setting], Result]

SMALL_MODEL = ModelConfig(vocabulary=256, n_layer=2, d_model=64, n_head=4, d_head=16, d_inner=128, memory=24)
SMALL = RunConfig(
    model=SMALL_MODEL,
    training=TrainingConfig(
        segment=24,
        lanes=8,
        steps=20,
        learning_rate=2e-3,
        precision="float32",
        validate_every=0,
        validation_tokens=200,
        save_every=0,
        save_minutes=0.0,
        log_every=5,
    ),
    evaluation=EvaluationConfig(segment=24, memory=24),
)
"""Learns in moments, and has all parts of the paper's model."""


# --- what several checks need

LANES, SEGMENT, MEMORY = 2, 40, 90
"""Tiles and vectors of every kernel have another size: each ends in the middle of one."""
WORDS, CUTOFFS = 96, (24, 40, 64)


def one_layer(config: ModelConfig, **changes: object) -> ModelConfig:
    """A layer of the preset's own widths and heads, with little around it, a short memory and no dropout."""
    still = {f"{site}_dropout": 0.0 for site in (*DROPOUT_SITES, "word")} | {"dropout": 0.0, "locked_dropout": ()}
    sizes = {"n_layer": 1, "vocabulary": WORDS, "cutoffs": CUTOFFS[: len(config.cutoffs)], "init_std": 0.05}
    sizes |= {"memory": min(config.memory, MEMORY), "ngram_rows": min(config.ngram_rows, WORDS)}
    return replace(config, **{**still, **sizes, **changes})  # type: ignore[arg-type]


def drawn_model(config: ModelConfig) -> TransformerXL:
    """In float64 on the processor. Biases and norms start at 0 and 1, where a mistake in them would stay unseen: they are moved."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TransformerXL(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1 or parameter.abs().max() < config.init_std:
                    parameter.add_(0.05 * torch.randn_like(parameter))
    return model.double()


def drawn_tokens(lanes: int, length: int, *, seed: int = 0, vocabulary: int = WORDS) -> Tensor:
    return torch.randint(vocabulary, (lanes, length), generator=torch.Generator().manual_seed(seed))


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Of each, as a share of the expected one's norm; infinite where something is no number."""
    apart = {}
    for name, right in expected.items():
        right = right.double().cpu()
        share = float((found[name].detach().double().cpu() - right).norm() / right.norm().clamp(min=1e-30))
        apart[name] = share if share == share else float("inf")
    return apart


def worst(shares: Mapping[str, float]) -> tuple[str, float]:
    return max(shares.items(), key=lambda item: item[1])


def joined(names: Sequence[str], *, most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
