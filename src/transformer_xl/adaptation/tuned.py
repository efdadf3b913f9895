"""What was found on valid, kept in the run: RUN/adaptation.json, and RUN/adaptation.safetensors beside it. Anybody may have written them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from transformer_xl.adaptation.statistics import Statistics, read_statistics, write_statistics
from transformer_xl.checkpoint.adapter_file import fingerprint
from transformer_xl.checkpoint.run_folder import ADAPTATION, GRADIENT_SIZES, RunFolder
from transformer_xl.config import AdaptationConfig
from transformer_xl.config.adaptation import Adapt
from transformer_xl.config.fields import not_negative, positive, read
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.files import open_plain, write_json
from transformer_xl.model import AnyModel


@dataclass(frozen=True, kw_only=True)
class Trial:
    how: AdaptationConfig
    nats: float
    """Mean loss per token of valid."""
    seconds: float
    """Of that pass."""

    def __post_init__(self) -> None:
        not_negative(self, "trial", "nats", "seconds")


@dataclass(frozen=True, kw_only=True)
class Tuned:
    version: int = 1
    base: str
    """The fingerprint of the weights."""
    corpus: str
    tokens: int
    """Of valid, from its beginning."""
    static: Trial
    gradient: Trial
    cache: Trial
    both: Trial
    passes: int
    """Over valid, to find them all."""

    def __post_init__(self) -> None:
        positive(self, "tuned", "tokens", "passes")
        if self.version != 1:
            raise ConfigError(f"version {self.version} is unknown; it must be 1")


def write_tuned(run: RunFolder, tuned: Tuned, statistics: Statistics) -> Path:
    write_statistics(run.inside(GRADIENT_SIZES), statistics, base=tuned.base)
    write_json(run.inside(ADAPTATION), asdict(tuned))
    return run.inside(ADAPTATION)


def read_tuned(run: RunFolder, *, base: str) -> Tuned | None:
    """None where nothing was tuned."""
    path = run.path / ADAPTATION
    if not path.exists():
        return None
    try:
        with open_plain(path, "r") as file:
            tuned = read(Tuned, json.load(file), name="")
    except (ValueError, RecursionError, ConfigError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); make it anew with: txl tune-adaptation {run.path}"
        ) from None
    if tuned.base != base:
        raise CheckpointError(
            f"{path} was made for other weights than these (another checkpoint, or an adapter); make it anew with: txl tune-adaptation {run.path}"
        )
    return tuned


def settings_of(
    run: RunFolder | None, model: AnyModel, adapt: Adapt | AdaptationConfig, *, segment: int
) -> tuple[AdaptationConfig, Statistics | None]:
    """As asked for: by a word, what was tuned for the run; and the sizes of its gradients, where rms needs them. `segment`: that is evaluated with."""
    statistics, base = None, fingerprint(model.state_dict())
    if isinstance(adapt, AdaptationConfig):
        how = adapt
    else:
        tuned = None if run is None else read_tuned(run, base=base)
        if tuned is None:
            raise ConfigError(
                f"`adapt={adapt}` asks for settings that were tuned for this run, and there are none; make them with: txl tune-adaptation"
                f" {'RUN' if run is None else run.path}, or give all settings yourself"
            )
        how = {"gradient": tuned.gradient, "cache": tuned.cache, "both": tuned.both}[adapt].how
    if how.moves and how.rule == "rms" and run is not None and (run.path / GRADIENT_SIZES).exists():
        statistics = read_statistics(run.path / GRADIENT_SIZES, model=model, base=base)
    return how.in_segments(segment), statistics
