"""Trains what is missing, reuses what is there, and keeps every evaluation beside its run: a study that is run again only does what is left."""

import json
import shlex
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformer_xl.checkpoint import Checkpoint, RunFolder, load_checkpoint, same_tokenizer
from transformer_xl.checkpoint.folder import read_config
from transformer_xl.config import RunConfig
from transformer_xl.console import say
from transformer_xl.data.store import Split, Store, open_store
from transformer_xl.devices import choose_device
from transformer_xl.errors import CheckpointError, DataError, TransformerXLError
from transformer_xl.files import write_json
from transformer_xl.studies.models import Asked, Base, Variant, asked_model, on_device
from transformer_xl.studies.scales import Scale
from transformer_xl.training import train
from transformer_xl.training.loop import settled
from transformer_xl.training.recording import read_metrics


class StudyStopped(TransformerXLError):
    """Somebody asked the study to stop while a model was trained; what it has is saved."""

    def __init__(self, message: str, *, by: signal.Signals) -> None:
        super().__init__(message)
        self.signal = by


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every study is told: how large, on what, where to."""

    study: str
    scale: Scale
    data: Path | str | None
    out: Path
    seeds: int
    device: str
    shift: Path | str | None = None
    """A store of another kind of text, for the study that reads one."""

    @property
    def command(self) -> str:
        data = [] if self.data is None else ["--data", str(self.data)]
        data += [] if self.shift is None else ["--shift", str(self.shift)]
        start = ["txl", "study", self.study, "--scale", self.scale.name, *data]
        return shlex.join([*start, "--out", str(self.out), "--seeds", str(self.seeds), *on_device(self.device)])

    def place(self, ending: str) -> Path:
        return self.out / f"{self.study}-{self.scale.name}{ending}"

    def store(self, base: Base) -> Store:
        if self.data is None:
            raise DataError(
                f"{self.study} at scale {self.scale.name} is trained on {base.corpus}; make it with: txl prepare {base.corpus} --out data/{base.corpus},"
                f" then give `data=data/{base.corpus}`"
            )
        store = open_store(self.data)
        for split in ("train", "valid", "test"):
            if split not in store.splits:
                raise DataError(
                    f"{store.folder} has no {split} split, which {self.study} needs; prepare one, such as {base.corpus}"
                )
        return store

    def valid(self, store: Store) -> Split:
        """What is chosen on."""
        return self._beginning(store.split("valid"))

    def test(self, store: Store) -> Split:
        """What is told on."""
        return self._beginning(store.split("test"))

    def _beginning(self, split: Split) -> Split:
        return split if self.scale.test_tokens is None else split.first(self.scale.test_tokens)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model that is finished, with what it took."""

    asked: Asked
    folder: Path
    seed: int
    seconds: float
    tokens: int

    def load(self, *, device: str) -> Checkpoint:
        return load_checkpoint(self.folder, device=device)


def variant_model(base: Base, variant: Variant | str, *, store: Store, seed: int) -> Asked:
    manifest = store.manifest
    return asked_model(base, variant, corpus=manifest.name, vocabulary=manifest.vocabulary_size, seed=seed)


def trained(setting: Setting, asked: Asked, *, store: Store, seed: int) -> Trained:
    """The run of a model, trained to its end if it is not yet."""
    folder = setting.out / "runs" / asked.name
    run = RunFolder(folder)
    check_run(run, settled(asked.config, choose_device(setting.device)), store=store)
    if asked.config.training.steps in run.steps():
        say(f"{asked.name} is trained already")
    else:
        command = asked.command(data=store.folder, run=folder, device=setting.device)
        outcome = train(asked.config, store=store, folder=folder, device=setting.device, command=command)
        if outcome.stopped_by is not None:
            raise StudyStopped(
                f"{asked.name} stopped at step {outcome.step} and saved; the same command goes on",
                by=outcome.stopped_by,
            )
    last = [line for line in read_metrics(run.metrics) if line["kind"] == "train"][-1]
    return Trained(asked=asked, folder=folder, seed=seed, seconds=last["seconds"], tokens=last["tokens"])


def check_run(run: RunFolder, config: RunConfig, *, store: Store) -> None:
    """What lies there already must be the beginning, or the whole, of this very model on this very data."""
    if not run.steps():
        return
    checkpoint = run.checkpoint_at(run.steps()[-1])
    then, now = asdict(read_config(checkpoint / "config.json")), asdict(config)
    changed = [
        f"{part}.{name} {then[part].get(name)} -> {now[part].get(name)}"
        for part in ("model", "training")
        for name in sorted(then[part].keys() | now[part].keys())
        if then[part].get(name) != now[part].get(name)
    ]
    way_out = "choose another `out=`, or remove that run"
    if changed:
        raise CheckpointError(f"{run.path} was made with another configuration ({', '.join(changed[:3])}); {way_out}")
    with suppress(FileNotFoundError, ValueError):
        rule = json.loads((checkpoint / "about.json").read_text(encoding="utf-8")).get("rule")
        if rule != store.manifest.rule or not same_tokenizer(checkpoint, store.folder):
            raise CheckpointError(f"{run.path} was trained on other data than {store.folder}; {way_out}")


def remembered(
    folder: Path, name: str, *, key: dict[str, Any], compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What `compute` returns, from the run's evaluations where it was computed before under the same key."""
    path = RunFolder(folder).made("evaluations") / f"study-{name}.json"
    with suppress(FileNotFoundError, ValueError, KeyError):
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["key"] == key:
            return dict(saved["found"])
    found = compute()
    write_json(path, {"key": key, "found": found})
    return found
