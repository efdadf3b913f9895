"""What will be done with a text, and why: kept in the run's folder, so that the same command goes on with it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from transformer_xl.checkpoint import verified_folder
from transformer_xl.checkpoint.folder import read_config
from transformer_xl.config import RunConfig
from transformer_xl.config.fields import read
from transformer_xl.config.sources import read_file, resolve
from transformer_xl.data.corpora.own_text import Kind, OwnText
from transformer_xl.data.corpora.selection import Inputs
from transformer_xl.data.store import Store
from transformer_xl.data.text.tokenizers import load_tokenizer
from transformer_xl.errors import ConfigError
from transformer_xl.presets import find_preset

DATA, PLAN = "data", "plan.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be done, and why. Kept in the run's folder, so that the same command goes on with it."""

    paths: tuple[str, ...]
    minutes: float
    inputs: Inputs
    tokenizer: Kind | None
    """None: that of `origin`."""
    vocabulary_size: int | None
    split_by: Literal["share", "file"]
    reasons: tuple[str, ...]
    wish: str | None = None
    """What it was asked to begin with; None: whatever is best."""
    origin: str | None = None
    """The run whose weights it begins with."""
    disk: tuple[int, int] = (0, 0)
    """How many files there were, and their bytes on disk; zeros where that was not kept."""
    preset: str = ""
    changes: tuple[str, ...] = ()
    """Fields that differ from the preset's, or the origin's: `model.n_layer=3`."""

    @property
    def settings(self) -> OwnText:
        how: dict[str, Any] = {"split_by": self.split_by, "inputs": self.inputs}
        if self.origin is not None:
            return OwnText(existing=load_tokenizer(verified_folder(self.origin) / "tokenizer"), **how)
        return OwnText(tokenizer=self.tokenizer or "byte", vocabulary_size=self.vocabulary_size, **how)

    @property
    def base(self) -> RunConfig:
        """What `changes` change."""
        if self.origin is None:
            return find_preset(self.preset).run
        return read_config(verified_folder(self.origin) / "config.json")

    @property
    def words(self) -> list[tuple[str, str]]:
        """The changes as names and values."""
        return [(change.partition("=")[0], change.partition("=")[2]) for change in self.changes]

    def config(self, store: Store) -> RunConfig:
        words = {**dict(self.words), "training.minutes": str(self.minutes)}
        return resolve(self.base, vocabulary=store.manifest.vocabulary_size, files=[], words=words)


def changes_of(config: RunConfig, base: RunConfig) -> tuple[str, ...]:
    """Fields of `config` that differ from the preset's."""
    told_apart = {("model", "vocabulary"), ("training", "minutes")}
    return tuple(
        f"{part}.{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for part in ("model", "training")
        for name, value in asdict(getattr(config, part)).items()
        if value != getattr(getattr(base, part), name) and (part, name) not in told_apart
    )


def plan_in(folder: Path, asked: dict[str, Any]) -> Plan:
    """The plan that was begun there, for the same wish."""
    try:
        plan = read(Plan, read_file(folder / PLAN), name="")
    except ConfigError as error:
        raise ConfigError(f"{folder / PLAN}: {error}; choose another `run=`") from None
    if differing := [name for name, value in asked.items() if not _same(getattr(plan, name), value)]:
        begun = f"{', '.join(plan.paths)} for {plan.minutes:g} minutes" + (f" from {plan.wish}" if plan.wish else "")
        if differing == ["inputs"]:
            names = [name for name, value in asdict(asked["inputs"]).items() if value != getattr(plan.inputs, name)]
            begun += " and " + ", ".join(f"{name} {getattr(plan.inputs, name) or 'not given'}" for name in names)
        raise ConfigError(f"{folder} was begun with {begun}; ask for just the same to go on, or choose another `run=`")
    return plan


def _same(then: Any, now: Any) -> bool:
    """Paths are the same however they are written."""
    if isinstance(now, tuple):
        return [Path(path) for path in then] == [Path(path) for path in now]
    return bool(then == now)
