"""What a run that began with another's weights gained on its own text, and lost on the other's: both models on the valid split of both, by one rule."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_xl.checkpoint import RunFolder, load_checkpoint, same_tokenizer
from transformer_xl.config import EvaluationConfig
from transformer_xl.console import progress, say
from transformer_xl.data.remote import is_address
from transformer_xl.data.store import Split, Store, open_store
from transformer_xl.errors import TransformerXLError
from transformer_xl.evaluation import UNIT_NAMES, Figures, evaluate, make_rule
from transformer_xl.files import path_from_text, write_json
from transformer_xl.model import AnyModel
from transformer_xl.training.lifetime import StopAsked, StopRequest
from transformer_xl.training.origin import Origin
from transformer_xl.training.session import Session
from transformer_xl.training.validating import validation_split

READINGS = 4
"""Two models, two texts."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Of one text."""

    corpus: str
    unit: str
    before: Figures
    after: Figures

    def sentence(self) -> str:
        """The unit is of the text, and less is better in each."""
        before, after = self.before.value(self.unit), self.after.value(self.unit)
        word = "gained" if after <= before else "lost"
        return f"{self.corpus}: {word} {abs(before - after):.4f} {UNIT_NAMES[self.unit]} ({before:.4f} -> {after:.4f})"

    def as_json(self) -> dict[str, Any]:
        return {
            "corpus": self.corpus,
            "unit": self.unit,
            "before": self.before.as_json(),
            "after": self.after.as_json(),
        }


def measure_gains(run: RunFolder, origin: Origin, *, session: Session, store: Store, stop: StopRequest) -> list[Gain]:
    """Of the run's own text, then of the origin's where that is still here; also written to RUN/evaluations. A request to stop ends it, with what there is."""
    device, lengths = session.device, session.config.evaluation
    models = [origin.checkpoint.model.to(device), load_checkpoint(run.path, device=device).model]
    gains: list[Gain] = []
    try:
        for each in [store, *old_store(origin, store)]:
            if "valid" not in each.splits:
                say(f"{each.folder} has no valid split: what was gained or lost on it is not known")
                continue
            split = validation_split(session, each)
            if (
                session.timetable is not None
            ):  # all of it takes as long as one validation, which the clock has kept free
                split = split.first(max(2, len(split) // READINGS))
            before, after = (_figures(model, split, lengths=lengths, stop=stop) for model in models)
            name, unit = each.manifest.name, each.manifest.unit
            gains.append(Gain(corpus=f"{name} valid", unit=unit, before=before, after=after))
    except StopAsked:
        return gains
    write_json(run.made("evaluations") / "gained-and-lost.json", [gain.as_json() for gain in gains])
    return gains


def old_store(origin: Origin, store: Store) -> list[Store]:
    """The text that the origin was trained on, unless it is gone or is the new one; then it is said why nothing is told of it."""
    about, folder = origin.checkpoint.about, origin.checkpoint.folder
    if not about.data:
        say(f"{folder} came without its text: what was lost on that is not known")
        return []
    if is_address(about.data):
        say(f"the text of {folder} lies at {about.data}, and not here: what was lost on it is not known")
        return []
    path: Path = path_from_text(about.data)
    try:
        old = open_store(path)
    except (TransformerXLError, OSError):
        say(f"the text of {folder} is no longer at {path}: what was lost on it is not known")
        return []
    if not same_tokenizer(folder, old.folder):
        say(f"{path} now holds text in other tokens than {folder} knows: what was lost is not known")
        return []
    return [] if old.fingerprint() == store.fingerprint() else [old]


def _figures(model: AnyModel, split: Split, *, lengths: EvaluationConfig, stop: StopRequest) -> Figures:
    rule = make_rule(model, lengths, tokens=len(split))
    with progress("comparing", total=len(split) - 1, unit="tokens") as advance:
        return evaluate(model, split, rule=rule, advance=stop.interrupting(advance))
