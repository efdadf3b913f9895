"""What `import transformer_xl as txl` makes: a store of text, and a run that is trained on it. As `txl prepare` and `txl train`, for programs, threads and
notebooks.

store = txl.prepare("logs/")
run = txl.train(store, minutes=10, on_step=lambda now: now.loss_nats < 0.5 and now.stop())
run.metrics.to_pandas()
run.load().generate("ERROR ")
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformer_xl.arguments import checked
from transformer_xl.checkpoint import RunFolder
from transformer_xl.checkpoint.folder import read_about, read_config
from transformer_xl.config import RunConfig
from transformer_xl.config.sources import for_vocabulary, with_values
from transformer_xl.data.corpora.dealing import Engine
from transformer_xl.data.corpora.inputs import check_paths
from transformer_xl.data.corpora.known import prepare_known
from transformer_xl.data.corpora.own_text import Documents, Kind, OwnText, prepare_own_text
from transformer_xl.data.corpora.python import prepare_python
from transformer_xl.data.corpora.recipes import NAMES, PYTHON
from transformer_xl.data.store import Store, open_store
from transformer_xl.devices import AUTO
from transformer_xl.errors import CheckpointError, ConfigError, DataError, suggest
from transformer_xl.evaluation import UNIT_NAMES
from transformer_xl.library import Loaded, load
from transformer_xl.presets import find_preset
from transformer_xl.rows import Rows
from transformer_xl.training import loop
from transformer_xl.training.card import plot_curve, value_of
from transformer_xl.training.clock import steps_in
from transformer_xl.training.recording import read_metrics
from transformer_xl.training.reporting import OnStep

PRESET_FOR = {"byte": "bytes", "char": "bytes", "bpe": "text"}
"""By kind of tokens; all others are words."""


@checked
def prepare(
    what: Path | str | Sequence[Path | str],
    *,
    out: Path | str | None = None,
    tokenizer: Kind = "byte",
    vocabulary_size: int | None = None,
    min_count: int | None = None,
    lower: bool = False,
    shares: tuple[float, ...] = (0.9, 0.05, 0.05),
    documents: Documents = "file",
    separator: str | None = None,
    source: Path | str | None = None,
    engine: Engine = "processes",
) -> Store:
    """A store of your own text (files and folders), or of a known corpus by its name ("python", "enwik8", ...; `source`: the file you have of it). It lands in
    `out`, or in data/NAME. What is there already is made anew: the same text gives the same store,
    whoever encodes it: the cores of this machine, or with `engine="ray"` the machines of a Ray cluster."""
    paths = [what] if isinstance(what, str | Path) else list(what)
    if not paths:
        raise DataError(f"nothing to prepare; name a corpus ({', '.join(NAMES)}) or give files or folders")
    check_paths(paths)
    name, out = str(paths[0]), Path(out) if out is not None else _place_for(paths)
    if name in NAMES and len(paths) == 1:
        if name == PYTHON:
            return prepare_python(out=out, engine=engine)
        return prepare_known(name, out=out, source=None if source is None else Path(source), engine=engine)
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"no corpus and no file {path}{suggest(str(path), NAMES)}")
        if path.is_dir() and out.resolve().is_relative_to(path.resolve()):
            raise DataError(f"{out} lies in {path}, whose text goes into it; choose another `out=`")
    settings = OwnText(
        tokenizer=tokenizer,
        vocabulary_size=vocabulary_size,
        min_count=min_count,
        lower=lower,
        shares=shares,
        documents="separator" if separator is not None and documents == "file" else documents,
        separator=separator,
    )
    return prepare_own_text(paths, out=out, settings=settings, engine=engine)


def _place_for(paths: Sequence[Path | str]) -> Path:
    return Path("data") / (Path(paths[0]).resolve().stem if str(paths[0]) not in NAMES else str(paths[0]))


@checked
def train(
    store: Store | Path | str,
    preset: str | RunConfig | None = None,
    *,
    run: Path | str | None = None,
    minutes: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    model: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    device: str = AUTO,
    resume: str = "auto",
    on_step: OnStep | None = None,
) -> "Run":
    """Trains for so many `minutes`, `epochs` or `steps`, or for as long as the preset says, and returns the run; called again, it goes on where it stopped.

    `preset`: a name (`txl presets` lists them) or a whole configuration; chosen by the store's tokens where none is given. `model` and `training` change single
    fields of it, by name. Everything lands in the folder `run`, or runs/NAME of the store. `on_step` is told of every step (`training.reporting.Step`) and can stop
    it with `now.stop()`; in the main thread, so do Ctrl-C and a notebook's interrupt."""
    opened = store if isinstance(store, Store) else open_store(store)
    folder = Path("runs") / Path(opened.place).name if run is None else Path(run)
    said = {"minutes": minutes, "epochs": epochs, "steps": steps}
    ends = [name for name, value in said.items() if value is not None]
    if len(ends) > 1:
        raise ConfigError(f"{ends[0]} and {ends[1]} both say how long to train; give one of them")
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"`minutes=` {minutes:g} is no time; give more than 0")
    config = _config_for(opened, preset, model=model, training=training)
    if minutes is not None or steps is not None:
        config = with_values(config, {"training": {name: said[name] for name in ends}})
    if epochs is not None:
        count = steps_in(epochs, config, opened)
        config = replace(config, training=replace(config.training, steps=count, minutes=0.0))
    words = [repr(opened.address or str(opened.folder)), *([repr(preset)] if isinstance(preset, str) else [])]
    words += [f"{name}={said[name]!r}" for name in ends] + [f"run={str(folder)!r}"]
    words += [f"{name}={dict(changes)!r}" for name, changes in (("model", model), ("training", training)) if changes]
    outcome = loop.train(
        config,
        store=opened,
        folder=folder,
        resume=resume,
        device=device,
        on_step=on_step,
        command=f"txl.train({', '.join(words)})",
    )
    return Run(folder, stopped=outcome.stopped_by is not None)


def preset_for(store: Store) -> str:
    return PRESET_FOR.get(store.manifest.tokenizer_kind, "words")


def _config_for(
    store: Store,
    preset: str | RunConfig | None,
    *,
    model: Mapping[str, Any] | None,
    training: Mapping[str, Any] | None,
) -> RunConfig:
    size = store.manifest.vocabulary_size
    preset = preset_for(store) if preset is None else preset
    base = find_preset(preset).run if isinstance(preset, str) else preset
    layers = {"model": {**for_vocabulary(base, size), **(model or {})}, "training": dict(training or {})}
    return with_values(base, layers)


class Run:
    """A run's folder: what was measured, and the model that came out."""

    def __init__(self, folder: Path | str, *, stopped: bool = False) -> None:
        """`stopped`: whether it was asked to, before its end."""
        self.path, self.stopped = Path(folder), stopped
        if not RunFolder(folder).config.is_file():
            raise CheckpointError(f"{folder} holds no run; train one with: txl train PRESET --data DIR --run {folder}")

    @property
    def config(self) -> RunConfig:
        return read_config(RunFolder(self.path).config)

    @property
    def metrics(self) -> Rows:
        """A row for each line of metrics.jsonl: kind "train" or "validation", step, loss_nats and what else was measured."""
        return Rows(read_metrics(RunFolder(self.path).metrics), name="metrics")

    @property
    def step(self) -> int:
        """Of the newest checkpoint; 0 where there is none yet."""
        return max(RunFolder(self.path).steps(), default=0)

    def load(self, *, memory: int | None = None, device: str = AUTO) -> Loaded:
        """The best checkpoint by validation, ready for use."""
        return load(self.path, memory=memory, device=device)

    def plot(self, path: Path | str | None = None) -> Any:
        """The losses, as a matplotlib Figure that a notebook shows; written to `path` (.png, .svg, .pdf) where one is given."""
        return plot_curve(RunFolder(self.path), None if path is None else Path(path), unit=self._unit)

    @property
    def _unit(self) -> str:
        return read_about(RunFolder(self.path).chosen_checkpoint() / "about.json").unit

    def __repr__(self) -> str:
        told = [f"step {self.step:,}" + " (stopped)" * self.stopped]
        validations = [row for row in self.metrics if row["kind"] == "validation"]
        if self.step and validations:
            best = min(validations, key=lambda row: float(row["loss_nats"]))
            told.append(
                f"best valid {UNIT_NAMES[self._unit]} {value_of(best, unit=self._unit):.4f} at step {best['step']:,}"
            )
        return f"<run {self.path}: {', '.join(told)}>"
