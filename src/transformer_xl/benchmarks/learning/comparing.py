"""From corpora and entrants to runs: for each peer a few choices on valid at a quarter of the time, then every seed for the whole time, one process at a time.

choosing, first corpus     sizes (if asked for) . rates . shapes of a batch       a quarter of the time each, valid alone
running, every corpus      seed 1 . seed 2 . seed 3                               the whole time; valid along the way, test at the end
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformer_xl.benchmarks.children import BenchmarkError
from transformer_xl.benchmarks.learning.entrants import AS_IT_IS, Entrant, Feed
from transformer_xl.benchmarks.learning.processes import machine_in_words
from transformer_xl.benchmarks.learning.results import Results
from transformer_xl.benchmarks.learning.sizes import is_near
from transformer_xl.console import Advance, progress, say
from transformer_xl.data.store import Store
from transformer_xl.evaluation.references import References, judged_by, references_of, text_of

LADDER = (500_000, 1_000_000, 2_000_000, 4_000_000)
TRIAL_SHARE = 0.25
FURTHER = 2.0
"""How much further a rate is tried when the best was the last of those in a row."""
VALID_BYTES = 50_000

Learn = Callable[[Entrant, dict[str, Any]], dict[str, Any]]
"""Has an entrant learn as a request says, in a process of its own; the answer has `disturbed`, too."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    minutes: float
    seeds: tuple[int, ...]
    size: Literal["equal", "best"]
    parameters: int
    """Of every entrant, where sizes are equal."""
    tune_on: Literal["first", "each"]
    one_core: bool = False
    """One thread each, and time is the processor's own for that process: it stands still while others have the core."""
    valid_bytes: int = VALID_BYTES
    test_bytes: int = 200_000
    marks: int = 8
    """How often valid is looked at along the way."""
    ladder: tuple[int, ...] = LADDER


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What is chosen for an entrant."""

    parameters: int
    rate: float | None = None
    feed: Feed | None = None


@dataclass(frozen=True, kw_only=True)
class Learned:
    """One run over the whole time."""

    entrant: str
    corpus: str
    seed: int
    parameters: int
    rate: float
    """The highest."""
    feed: Feed | None
    """None: as the configuration says."""
    steps: int
    tokens: int
    minutes: float
    valid: float | None
    """Bits per byte. None: its loss stopped being a number."""
    test: float | None
    curve: list[dict[str, float]]
    disturbed: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    machine: str
    settings: Settings
    runs: list[Learned]
    references: dict[str, References]
    """By corpus."""
    trials: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "settings": asdict(self.settings),
            "references": {corpus: reference.as_json() for corpus, reference in self.references.items()},
            "runs": [asdict(run) for run in self.runs],
            "trials": self.trials,
        }


def compare(
    corpora: Sequence[Store], entrants: Sequence[Entrant], *, settings: Settings, results: Results, learn: Learn
) -> Comparison:
    names = names_of(corpora)
    for store in corpora:
        check_corpus(store, settings)
    referees = {names[store.folder]: reference_for(store, settings, results) for store in corpora}
    runs: list[Learned] = []
    trials: list[dict[str, Any]] = []
    total = len(corpora) * len(entrants) * len(settings.seeds)
    with progress("bench learning", total=total, unit="runs") as advance:
        for entrant in entrants:
            chosen: Candidate | None = None
            for store in corpora:
                runner = Runner(entrant, store, names[store.folder], settings, results, learn, advance)
                if chosen is None or settings.tune_on == "each":
                    chosen = choose(runner, settings)
                    trials += runner.trials
                for seed in settings.seeds:
                    runs.append(runner.run(chosen, seed=seed))
                    advance(1)
    return Comparison(machine=machine_in_words(), settings=settings, runs=runs, references=referees, trials=trials)


def names_of(corpora: Sequence[Store]) -> dict[Path, str]:
    """A store's folder is its name."""
    names = {store.folder: store.folder.resolve().name for store in corpora}
    if len(set(names.values())) < len(corpora):
        raise BenchmarkError(f"`corpus=`: two stores have the same name ({', '.join(names.values())}); rename one")
    return names


def check_corpus(store: Store, settings: Settings) -> None:
    kind = store.manifest.tokenizer_kind
    if kind not in ("byte", "bpe"):
        raise BenchmarkError(
            f"`corpus={store.folder}` is made of {kind} tokens, and bits per byte are compared here; make it with: txl prepare ... --tokenizer byte, or bpe"
        )
    for split in ("train", "valid", "test"):
        if split not in store.splits or len(store.split(split)) < 2:
            raise BenchmarkError(f"`corpus={store.folder}` has no {split} split; prepare it with three shares")


def reference_for(store: Store, settings: Settings, results: Results) -> References:
    identity = {"reference": _sums(store), "test_bytes": settings.test_bytes}
    found = results.find(identity)
    if found is None:
        found = references_of(text_of(store, "train"), text_of(store, "test", first=settings.test_bytes)).as_json()
        results.add(identity, found)
    return References(**found)


def _sums(store: Store) -> list[str]:
    return sorted(file.sha256 for split in store.manifest.splits for file in split.files)


class Runner:
    """Has one entrant learn one corpus, or finds that it has."""

    def __init__(
        self,
        entrant: Entrant,
        store: Store,
        corpus: str,
        settings: Settings,
        results: Results,
        learn: Learn,
        advance: Advance,
    ) -> None:
        self.entrant, self.store, self.corpus, self.settings = entrant, store, corpus, settings
        self.results, self.learn, self.advance = results, learn, advance
        self.trials: list[dict[str, Any]] = []

    def trial(self, candidate: Candidate) -> float:
        """Bits per byte of valid after a quarter of the time; infinite where the loss was no number."""
        seconds = TRIAL_SHARE * 60 * self.settings.minutes
        answer = self._learned(candidate, seed=self.settings.seeds[0], seconds=seconds, test=None, marks=1)
        told = {"entrant": self.entrant.name, "corpus": self.corpus, **asdict(candidate), "valid": answer["valid"]}
        if told not in self.trials:
            self.trials.append(told)
        return float("inf") if answer["valid"] is None else float(answer["valid"])

    def run(self, candidate: Candidate, *, seed: int) -> Learned:
        settings = self.settings
        test = judged_by(self.store, "test", settings.test_bytes)
        answer = self._learned(candidate, seed=seed, seconds=60 * settings.minutes, test=test, marks=settings.marks)
        if settings.size == "equal" and not is_near(answer["parameters"], settings.parameters):
            raise BenchmarkError(
                f"{self.entrant.name} has {answer['parameters']:,} parameters, which is not within 3 % of `parameters={settings.parameters}`"
            )
        if answer["disturbed"]:
            say(
                f"{self.entrant.name} on {self.corpus}, seed {seed}: other processes were busy meanwhile; the figure is too high"
            )
        return Learned(
            entrant=self.entrant.name,
            corpus=self.corpus,
            seed=seed,
            rate=self._rate(candidate),
            feed=candidate.feed,
            minutes=answer["seconds"] / 60,
            **{name: answer[name] for name in ("parameters", "steps", "tokens", "valid", "test", "curve", "disturbed")},
        )

    def _rate(self, candidate: Candidate) -> float:
        if candidate.rate is not None:
            return candidate.rate
        return float(self._model(candidate)["training"]["learning_rate"])

    def _model(self, candidate: Candidate) -> dict[str, Any]:
        vocabulary = self.store.manifest.vocabulary_size
        return self.entrant.model(candidate.parameters, vocabulary, candidate.feed or {})

    def _learned(self, candidate: Candidate, **request: Any) -> dict[str, Any]:
        request |= {
            "entrant": self.entrant.name,
            "model": self._model(candidate),
            "feed": candidate.feed,
            "rate": candidate.rate,
            "one_core": self.settings.one_core,
            "dtype": str(self.store.split("train").tokens.dtype),
            "valid": judged_by(self.store, "valid", self.settings.valid_bytes),
        }
        identity = {"corpus": _sums(self.store), "machine": machine_in_words(), **request}
        found = self.results.find(identity)
        if found is None:
            doing = "learns" if request["test"] else "is chosen for on"
            self.advance(0, note=f"{self.entrant.name} {doing} {self.corpus}, {request['seconds']:.0f} s")
            files = {split: str(self.store.folder / f"{split}.tokens.bin") for split in ("train", "valid", "test")}
            found = self.learn(self.entrant, {**request, "store": str(self.store.folder), "files": files})
            self.results.add(identity, found)
        return found


def choose(runner: Runner, settings: Settings) -> Candidate:
    """One thing after the other: size, rate, shape of a batch. A rate at the end of its row is followed one step further."""
    entrant = runner.entrant
    middle = entrant.rates[len(entrant.rates) // 2] if entrant.rates else None
    chosen = Candidate(parameters=settings.parameters, rate=middle, feed=entrant.feeds[0] if entrant.feeds else None)
    if settings.size == "best" and entrant.kind == "ours":
        chosen = replace(chosen, parameters=AS_IT_IS)
    elif settings.size == "best":
        chosen = best(runner, [replace(chosen, parameters=parameters) for parameters in settings.ladder])
    if len(entrant.rates) > 1:
        rates = list(entrant.rates)
        chosen = best(runner, [replace(chosen, rate=rate) for rate in rates])
        beyond = {rates[0]: rates[0] / FURTHER, rates[-1]: rates[-1] * FURTHER}
        if chosen.rate in beyond:
            chosen = best(runner, [chosen, replace(chosen, rate=beyond[chosen.rate])])
    if len(entrant.feeds) > 1:
        chosen = best(runner, [replace(chosen, feed=feed) for feed in entrant.feeds])
    return chosen


def best(runner: Runner, candidates: list[Candidate]) -> Candidate:
    """Those that were tried before are found, not tried again."""
    return min(candidates, key=runner.trial)
