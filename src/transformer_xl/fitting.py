"""A model of somebody's own text, from the files to figures: looks, chooses, prepares, trains, and tells how it went. Knows what was measured to be good.

    paths -> Findings (how much, what kind) -> Plan (tokens, size, why) -> a store and a run -> Report (beside xz and n-grams, what surprised it)

run = txl.fit("logs/", minutes=10)
run = txl.fit("new.log", from_="runs/logs")     begins with the weights of a run, and its tokens; "box": with those of the model in the box
"""

import codecs
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from transformer_xl.arguments import checked
from transformer_xl.checkpoint import RunFolder, verified_folder
from transformer_xl.checkpoint.folder import read_config
from transformer_xl.config import ModelConfig, RunConfig
from transformer_xl.config.fields import read
from transformer_xl.config.sources import read_file, resolve
from transformer_xl.console import progress, say
from transformer_xl.data.corpora.inputs import STANDARD_INPUT, Gathered, check_paths, gather
from transformer_xl.data.corpora.own_text import Kind, OwnText, prepare_own_text
from transformer_xl.data.corpora.selection import Inputs
from transformer_xl.data.store import Store, open_store
from transformer_xl.data.text.tokenizers import STRAY, load_tokenizer
from transformer_xl.devices import AUTO, choose_device
from transformer_xl.errors import ConfigError, DataError
from transformer_xl.evaluation.lines import LineScore
from transformer_xl.evaluation.references import References, judged_by, references_of, text_of
from transformer_xl.files import atomic_folder, write_json
from transformer_xl.library import Loaded, load
from transformer_xl.presets import find_preset
from transformer_xl.presets.preset import sized
from transformer_xl.running import Run, preset_for
from transformer_xl.training import OnStep, train_unstuck
from transformer_xl.training.clock import seconds_of_a_step
from transformer_xl.training.loop import settled
from transformer_xl.training.origin import open_origin

DEFAULT_MINUTES = 10.0
READ_AT_ONCE = 1 << 20
FEWEST_BYTES = 5_000
"""Of a text that is worth a model."""
PAIRS_FROM = 300_000
"""Bytes of text from which on byte pairs are learned: of less there are too few of each."""
MOST_STRAY = 0.1
"""Share of bytes that are no UTF-8 in what is still a text: in byte pairs each is a token by itself."""
VOCABULARIES = ((0, 1024), (2_000_000, 2048), (6_000_000, 4096))
"""(bytes of text, byte pairs): the more text, the more of them are seen often enough."""
SIZES: tuple[tuple[float, dict[str, int]], ...] = (
    (0, {"n_layer": 2, "d_model": 192, "n_head": 6, "d_inner": 768}),
    (6e6, {"n_layer": 3, "d_model": 256, "n_head": 8, "d_inner": 1024}),
    (30e6, {"n_layer": 4, "d_model": 384, "n_head": 12, "d_inner": 1536}),
)
"""(tokens that the smallest reads in the time, shape): docs/experiments.md has what was measured."""
DROPOUTS = ((0, 0.0), (3, 0.1), (8, 0.2), (25, 0.3))
"""(times that the text is read, dropout)."""
TABLES_BELOW = 1.0
"""Times that a text is read. Tables of runs of tokens learn it sooner; read again, they know it by heart, and nothing else."""
TABLES: dict[str, dict[str, Any]] = {
    "byte": {"ngrams": (2, 3, 4, 5), "ngram_rows": 1 << 16, "d_ngram": 16},
    "bpe": {"ngrams": (2, 3), "ngram_rows": 1 << 16, "d_ngram": 32},
}
NO_TABLES: dict[str, Any] = {"ngrams": (), "ngram_rows": 0, "d_ngram": 0}
DECAYS = ((0, 0.0), (1, 0.1))
"""The same for weight decay."""
FEWEST_LANES = 4
MANY_FILES, SMALL_SHARE, LEAST_SMALL = 20, 0.05, 0.2
"""So many files that are no larger share of all than this, and together at least that share, are split file by file."""
TEST_BYTES = 200_000
REFERENCE_BYTES = 20_000_000
"""Of train, which n-grams are counted on: the end of it."""
SHORTEST_LINE = 20
DATA, PLAN = "data", "plan.json"


@dataclass(frozen=True, kw_only=True)
class Findings:
    files: int
    records: int
    bytes: int
    small: tuple[int, int]
    """How many files are small, and how many bytes they have together."""
    lines: int
    stray_bytes: int
    """That are no UTF-8."""
    skipped: dict[str, int]

    @property
    def is_text(self) -> bool:
        return self.stray_bytes <= MOST_STRAY * self.bytes

    @property
    def in_words(self) -> str:
        what = f"{self.records:,} records" if self.records else f"{self.files:,} file{'s' * (self.files != 1)}"
        stray = f"{self.stray_bytes:,} byte{'s' * (self.stray_bytes != 1)}"
        kind = "no UTF-8" if not self.is_text else "UTF-8 text" + (f" but for {stray}" if self.stray_bytes else "")
        left_out = "".join(f", {count:,} {why} left out" for why, count in self.skipped.items())
        return f"{what}, {self.bytes / 1e6:,.2f} MB, {self.lines:,} lines, {kind}{left_out}"


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


@dataclass(frozen=True, kw_only=True)
class Report:
    """Bits per byte of the beginning of test, each token in full context, beside what needs no training."""

    bits_per_byte: float
    before: float | None
    """The same of the run whose weights it began with."""
    test_bytes: int
    references: References
    most: tuple[LineScore, ...] = field(repr=False)
    """The lines of test that surprised it most, and least."""
    least: tuple[LineScore, ...] = field(repr=False)


# --- looking


def look(paths: Sequence[Path | str], *, inputs: Inputs) -> Findings:
    """Reads everything once."""
    if STANDARD_INPUT in map(str, paths):
        raise DataError("standard input can be read once, and txl fit reads its text twice; write it to a file first")
    with tempfile.TemporaryDirectory(prefix="txl-fit-") as name:
        return _findings(gather(paths, scratch=Path(name), inputs=inputs))


def _findings(gathered: Gathered) -> Findings:
    sizes: list[int] = []
    lines, stray = 0, 0
    with progress("looking", total=sum(source.disk_bytes for source in gathered.sources), unit="bytes") as advance:
        for source in gathered.sources:
            decoder, size = codecs.getincrementaldecoder("utf-8")("surrogateescape"), 0
            with source.open(advance=advance) as stream:
                while data := stream.read(READ_AT_ONCE):
                    size, lines = size + len(data), lines + data.count(b"\n")
                    stray += _strays(decoder.decode(data))
            stray += _strays(decoder.decode(b"", True))
            sizes.append(size)
    total = sum(sizes)
    small = [size for size in sizes if size <= SMALL_SHARE * total]
    if total < FEWEST_BYTES:
        raise DataError(f"there are {total:,} bytes of text, too few to learn from; give {FEWEST_BYTES:,} or more")
    return Findings(
        files=len(gathered.sources),
        records=gathered.records,
        bytes=total,
        small=(len(small), sum(small)),
        lines=lines,
        stray_bytes=stray,
        skipped=dict(gathered.counts),
    )


def _strays(text: str) -> int:
    return sum(map(len, STRAY.findall(text)))


# --- choosing


def choose_tokens(findings: Findings, origin: str | None = None) -> dict[str, Any]:
    """Tokenizer and splits, with reasons."""
    count, together = findings.small
    many = count >= MANY_FILES and together >= LEAST_SMALL * findings.bytes
    split_by = "file" if many else "share"
    splits = "whole files, by name" if many else "the end of it"
    size = None
    if origin is not None:
        why = f"those of {origin}, whose weights know no others"
    elif findings.is_text and findings.bytes >= PAIRS_FROM:
        size = _largest_within(VOCABULARIES, findings.bytes)
        why = f"{size:,} byte pairs, learned from it: a step reads several bytes, and there is enough text to see each pair often"
    else:
        why = "single bytes: " + ("it is too little text for byte pairs" if findings.is_text else "it is no UTF-8 text")
    reasons = (f"tokens: {why}", f"held out: 5 % to choose by and 5 % to tell by, {splits}")
    return {
        "tokenizer": None if origin is not None else "byte" if size is None else "bpe",
        "vocabulary_size": size,
        "split_by": split_by,
        "reasons": reasons,
    }


def choose_model(
    store: Store, base: RunConfig, *, minutes: float, device: str, origin: str | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """What is trained in the end, and why. Times some real steps of the smallest; of a model that exists, its own, and leaves it its size."""
    base = _for_store(base, store)
    place = choose_device(device)
    a_step = seconds_of_a_step(settled(base, place), store=store, device=place)
    tokens = 60 * minutes * base.training.lanes * base.training.segment / a_step
    config = base if origin is not None else sized(base, **_largest_within(SIZES, tokens))
    read_tokens, train = tokens * _numbers(base) / _numbers(config), len(store.split("train"))
    times = read_tokens / train
    dropout, decay = _largest_within(DROPOUTS, times), _largest_within(DECAYS, times)
    training = replace(config.training, minutes=minutes, weight_decay=decay)
    config, told = replace(sized(config, dropout=dropout), training=training), ""
    if origin is None:
        kind = store.manifest.tokenizer_kind
        config = sized(config, **(TABLES[kind] if times < TABLES_BELOW else NO_TABLES))
        told = f", {'no ' * (times >= TABLES_BELOW)}tables of runs of tokens"
    share = f"{times:.1f} times" if times >= 1 else f"to {times:.0%}, spread over all of it"
    size = f"{config.model.n_layer} layers, {config.model.d_model} wide" + (f", as {origin} is" if origin else "")
    reasons = (
        *([f"weights: it begins with those of {origin}"] if origin else []),
        f"size: {size}: {minutes:g} minutes read about {_in_millions(read_tokens)} tokens here",
        f"the text has {_in_millions(train)}, so it is read {share}: dropout {dropout:g}, weight decay {decay:g}{told}",
    )
    return config, reasons


def _in_millions(count: float) -> str:
    return f"{count / 1e6:.3g} million" if count >= 1e5 else f"{count:,.0f}"


def _largest_within(rows: Sequence[tuple[float, Any]], value: float) -> Any:
    return [chosen for least, chosen in rows if value >= least][-1]


def _numbers(run: RunConfig) -> int:
    """What a token's cost grows with."""
    model = run.model
    assert isinstance(model, ModelConfig)
    return model.n_layer * model.numbers_of_a_layer + model.d_model * model.vocabulary


def _for_store(run: RunConfig, store: Store) -> RunConfig:
    """With its vocabulary, and lanes that find room in a short text."""
    training, tokens = run.training, len(store.split("train"))
    lanes, stretch = training.lanes, training.stretch
    while lanes > FEWEST_LANES and lanes * training.segment * 4 > tokens:
        lanes //= 2
    while stretch > 1 and stretch * lanes * training.segment > tokens:
        stretch //= 2
    run = replace(run, training=replace(training, lanes=lanes, stretch=stretch))
    return sized(run, vocabulary=store.manifest.vocabulary_size)


def changes_of(config: RunConfig, base: RunConfig) -> tuple[str, ...]:
    """Fields of `config` that differ from the preset's."""
    told_apart = {("model", "vocabulary"), ("training", "minutes")}
    return tuple(
        f"{part}.{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for part in ("model", "training")
        for name, value in asdict(getattr(config, part)).items()
        if value != getattr(getattr(base, part), name) and (part, name) not in told_apart
    )


# --- doing


@checked
def fit(
    what: Path | str | Sequence[Path | str],
    *,
    minutes: float = DEFAULT_MINUTES,
    run: Path | str | None = None,
    inputs: Inputs | None = None,
    device: str = AUTO,
    on_step: OnStep | None = None,
    from_: Path | str | None = None,
) -> Run:
    """Looks at the text, chooses tokens and a model for it, this machine and this time, and trains it. Called again, it goes on where it stopped. Everything
    lands in the folder `run`, or runs/NAME of the text, with the store in its folder `data`. `from_`: a run that it begins with, its tokens, model and
    weights, in place of choosing; "box": the model in the box."""
    folder, plan, store = prepared(what, minutes=minutes, run=run, inputs=inputs, device=device, from_=from_)
    words = f"{list(plan.paths)!r}, minutes={minutes:g}, run={str(folder)!r}"
    words += "" if plan.origin is None else f", from_={plan.origin!r}"
    return trained(folder, plan, store, device=device, on_step=on_step, command=f"txl.fit({words})")


def prepared(
    what: Path | str | Sequence[Path | str],
    *,
    minutes: float = DEFAULT_MINUTES,
    run: Path | str | None = None,
    inputs: Inputs | None = None,
    device: str = AUTO,
    from_: Path | str | None = None,
) -> tuple[Path, Plan, Store]:
    """Up to training: the run's folder, the plan and the store, made or found there."""
    if not 0 < minutes < math.inf:
        raise ConfigError(f"`minutes=` {minutes:g} is no time; give more than 0")
    paths = (str(what),) if isinstance(what, str | Path) else tuple(map(str, what))
    if not paths:
        raise DataError("nothing to fit; give files or folders")
    check_paths(paths)
    folder = Path(run) if run is not None else Path("runs") / (Path(paths[0]).resolve().stem or "text")
    asked: dict[str, Any] = {"paths": paths, "minutes": float(minutes), "inputs": inputs or Inputs()}
    asked["origin"] = origin = None if from_ is None else str(from_)
    if (folder / PLAN).exists():
        plan = plan_in(folder, asked)
        if any(plan.disk) and plan.disk != (now := on_disk(paths)):
            say(
                f"the text is not what it was when {folder} was begun: {plan.disk[0]:,} files of {plan.disk[1]:,} bytes then, {now[0]:,} of {now[1]:,} now;"
                f" going on with what was read then. To learn the new text, choose another `run=` and give `from={folder}`"
            )
        return folder, plan, open_store(folder / DATA)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty, and nothing was fitted there; choose another `run=`")
    for path in map(Path, paths):
        if path.is_dir() and folder.resolve().is_relative_to(path.resolve()):
            raise DataError(f"{folder} lies in {path}, whose text goes into it; choose another `run=`")
    if origin is not None and not isinstance(read_config(verified_folder(origin) / "config.json").model, ModelConfig):
        raise ConfigError(f"{origin} is no Transformer-XL; go on with it by txl prepare and txl train")
    findings = look(paths, inputs=asked["inputs"])
    say(findings.in_words)
    plan = Plan(**asked, **choose_tokens(findings, origin), disk=on_disk(paths))
    # Whole or not at all: a plan without its text, or a text without its plan, is nothing to go on with.
    with atomic_folder(folder) as beside:
        store = prepare_own_text(paths, out=beside / DATA, settings=plan.settings)
        plan = plan if origin is not None else replace(plan, preset=preset_for(store))
        config, reasons = choose_model(store, plan.base, minutes=minutes, device=device, origin=origin)
        plan = replace(plan, reasons=(*plan.reasons, *reasons), changes=changes_of(config, plan.base))
        write_json(beside / PLAN, asdict(plan))
    return folder, plan, open_store(folder / DATA)


def on_disk(paths: Sequence[str]) -> tuple[int, int]:
    """Files below the paths and their bytes, without reading them: enough to see that a text has grown."""
    files = [file for path in map(Path, paths) for file in (path.rglob("*") if path.is_dir() else [path])]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return len(sizes), sum(sizes)


def plan_in(folder: Path, asked: dict[str, Any]) -> Plan:
    """The plan that was begun there, for the same wish."""
    try:
        plan = read(Plan, read_file(folder / PLAN), name="")
    except ConfigError as error:
        raise ConfigError(f"{folder / PLAN}: {error}; choose another `run=`") from None
    if any(getattr(plan, name) != value for name, value in asked.items()):
        begun = f"{', '.join(plan.paths)} for {plan.minutes:g} minutes" + (
            f" from {plan.origin}" if plan.origin else ""
        )
        raise ConfigError(f"{folder} was begun with {begun}; ask for just the same to go on, or choose another `run=`")
    return plan


def trained(folder: Path, plan: Plan, store: Store, *, device: str = AUTO, **how: Any) -> Run:
    """`how`: what else training takes, such as `on_step`, and the `command` that asked for it."""
    origin = None if plan.origin is None else open_origin(plan.origin, store=store)
    outcome = train_unstuck(plan.config(store), store=store, folder=folder, device=device, origin=origin, **how)
    return Run(folder, stopped=outcome.stopped_by is not None)


# --- telling


def report(run: Run, store: Store, *, origin: str | None = None, device: str = AUTO) -> Report:
    loaded = load(run.path, device=device)
    test, train = text_of(store, "test", first=TEST_BYTES), text_of(store, "train", last=REFERENCE_BYTES)
    judged = judged_by(store, "test", TEST_BYTES)

    def bits(model: Loaded) -> float:
        figures = model.evaluate(data=store.folder, split="test", tokens=judged["tokens"])
        return figures.bits_per_token * (judged["tokens"] - 1) / judged["bytes"]

    lines = sorted(_lines(loaded, test.tobytes()), key=lambda line: line.bits_per_byte)
    found = Report(
        bits_per_byte=bits(loaded),
        before=None if origin is None else bits(load(origin, device=device)),
        test_bytes=judged["bytes"],
        references=references_of(train, test),
        most=tuple(lines[-2:][::-1]),
        least=tuple(lines[: max(0, min(2, len(lines) - 2))]),
    )
    write_json(RunFolder(run.path).made("evaluations") / "fit.json", asdict(found))
    return found


def _lines(loaded: Loaded, text: bytes) -> list[LineScore]:
    """Those of some length, each once; of a text that has none, all."""
    scorer = loaded.line_scorer()
    with progress("reading lines", total=len(text), unit="bytes") as advance:
        found: dict[str | None, LineScore] = {}
        for line in chain(scorer.feed(text), scorer.finish()):
            advance(line.bytes)
            found.setdefault(line.text, line)
    long = [line for line in found.values() if line.bytes >= SHORTEST_LINE]
    return long or list(found.values())
