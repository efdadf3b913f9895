"""Tables 6 and 7 and Appendix A: models that differ in recurrence, encoding, loss and length, evaluated at many attention lengths."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformer_xl.console import progress
from transformer_xl.data.store import Split, Store
from transformer_xl.evaluation import UNIT_NAMES
from transformer_xl.model import TransformerXL
from transformer_xl.pictures import draw_lines
from transformer_xl.studies import lengths as attention
from transformer_xl.studies.models import Variant, on_device
from transformer_xl.studies.report import Report, mean_and_spread, several
from transformer_xl.studies.runs import Setting, Trained, remembered, trained, variant_model
from transformer_xl.studies.sentences import in_sentences
from transformer_xl.studies.verdicts import Claim

ENCODING_NAMES = {"relative": "Ours", "shaw": "Shaw", "absolute": "Vaswani", "per_layer": "Al-Rfou"}
DIGITS = {"perplexity_per_word": 2, "bits_per_character": 3, "bits_per_byte": 3}


@dataclass(frozen=True, kw_only=True)
class Row:
    variant: Variant
    title: str = ""
    paper_init: float | None = None
    paper_best: float
    paper_attention: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ablation:
    title: str
    base: Literal["ablation", "sentences"]
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]
    notes: tuple[str, ...] = ()


XL = Variant(name="transformer-xl")
SHAW = Variant(name="shaw", encoding="shaw")
XL_HALF = Variant(name="transformer-xl-half", half_loss=True)
NO_RECURRENCE = Variant(name="no-recurrence", recurrence=False)
NO_RECURRENCE_HALF = Variant(name="no-recurrence-half", recurrence=False, half_loss=True)
SHAW_NO_RECURRENCE = Variant(name="shaw-no-recurrence", recurrence=False, encoding="shaw")
SHAW_NO_RECURRENCE_HALF = Variant(name="shaw-no-recurrence-half", recurrence=False, encoding="shaw", half_loss=True)
ABSOLUTE_HALF = Variant(name="absolute-half", recurrence=False, encoding="absolute", half_loss=True)
PER_LAYER_HALF = Variant(name="per-layer-half", recurrence=False, encoding="per_layer", half_loss=True)
LONGER = Variant(name="no-recurrence-176", recurrence=False, length=176 / 128)
LONGER_HALF = Variant(name="no-recurrence-half-172", recurrence=False, half_loss=True, length=172 / 128)


def _better(text: str, better: Variant, worse: Variant) -> Claim:
    return Claim(text=text, lower=(better.name, "best"), higher=(worse.name, "best"))


def _longer(text: str, variant: Variant) -> Claim:
    return Claim(text=text, lower=(variant.name, "trained_attention"), higher=(variant.name, "attention"))


def _not_longer(text: str, variant: Variant) -> Claim:
    ends = {"lower": (variant.name, "attention"), "higher": (variant.name, "trained_attention")}
    return Claim(text=text, **ends, or_equal=True)


ENCODING = Ablation(
    title="Recurrence, encoding and loss (the paper's Table 6)",
    base="ablation",
    rows=(
        Row(variant=XL, title="Transformer-XL", paper_init=27.02, paper_best=26.77, paper_attention=500),
        Row(variant=SHAW, paper_init=27.94, paper_best=27.94, paper_attention=256),
        Row(variant=XL_HALF, paper_init=28.69, paper_best=28.33, paper_attention=460),
        Row(variant=NO_RECURRENCE, paper_init=29.59, paper_best=29.02, paper_attention=260),
        Row(variant=NO_RECURRENCE_HALF, paper_init=30.10, paper_best=30.10, paper_attention=120),
        Row(variant=SHAW_NO_RECURRENCE, paper_init=29.75, paper_best=29.75, paper_attention=120),
        Row(variant=SHAW_NO_RECURRENCE_HALF, paper_init=30.50, paper_best=30.50, paper_attention=120),
        Row(variant=ABSOLUTE_HALF, paper_init=30.97, paper_best=30.97, paper_attention=120),
        Row(variant=PER_LAYER_HALF, title="Transformer", paper_init=31.16, paper_best=31.16, paper_attention=120),
    ),
    claims=(
        _better("recurrence is better than none (ours, full loss)", XL, NO_RECURRENCE),
        _better("recurrence is better than none (ours, half loss)", XL_HALF, NO_RECURRENCE_HALF),
        _better("recurrence is better than none (Shaw, full loss)", SHAW, SHAW_NO_RECURRENCE),
        _better("our encoding is better than Shaw's (recurrence, full loss)", XL, SHAW),
        _better("our encoding is better than Shaw's (no recurrence, full loss)", NO_RECURRENCE, SHAW_NO_RECURRENCE),
        _better(
            "our encoding is better than Shaw's (no recurrence, half loss)", NO_RECURRENCE_HALF, SHAW_NO_RECURRENCE_HALF
        ),
        _better(
            "relative encodings are better than absolute ones (Shaw, Vaswani)", SHAW_NO_RECURRENCE_HALF, ABSOLUTE_HALF
        ),
        _better("Vaswani's encoding is better than Al-Rfou's", ABSOLUTE_HALF, PER_LAYER_HALF),
        _better("full loss is better than half (ours, recurrence)", XL, XL_HALF),
        _better("full loss is better than half (ours, no recurrence)", NO_RECURRENCE, NO_RECURRENCE_HALF),
        _better("full loss is better than half (Shaw, no recurrence)", SHAW_NO_RECURRENCE, SHAW_NO_RECURRENCE_HALF),
        _longer("Transformer-XL is best with a longer attention than it was trained with", XL),
        _longer("so is our encoding with half loss", XL_HALF),
        _longer("so is our encoding without recurrence", NO_RECURRENCE),
        _not_longer("Shaw's encoding is not", SHAW),
        _not_longer("Shaw's encoding without recurrence is not", SHAW_NO_RECURRENCE),
        _not_longer("Vaswani's encoding is not", ABSOLUTE_HALF),
    ),
)
FRAGMENTATION = Ablation(
    title="Context fragmentation: sentences without order (the paper's Table 7)",
    base="sentences",
    rows=(
        Row(variant=XL, title="Ours", paper_best=25.2),
        Row(variant=SHAW, title="With Shaw's encoding", paper_best=25.7),
        Row(variant=NO_RECURRENCE, title="Without recurrence", paper_best=27.1),
    ),
    claims=(
        _better("recurrence is better than none where nothing depends on earlier sentences", XL, NO_RECURRENCE),
        _better("our encoding is better than Shaw's", XL, SHAW),
    ),
    notes=("the paper gives one figure for each row, and not its attention length: it stands beside our best",),
)
MEMORY_MATCHED = Ablation(
    title="Equal memory: a longer segment in place of recurrence (the paper's Appendix A)",
    base="ablation",
    rows=(
        Row(variant=XL, paper_init=27.02, paper_best=26.77, paper_attention=500),
        Row(variant=XL_HALF, paper_init=28.69, paper_best=28.33, paper_attention=460),
        Row(variant=LONGER, paper_init=28.43, paper_best=27.98, paper_attention=400),
        Row(variant=LONGER_HALF, paper_init=28.83, paper_best=28.83, paper_attention=120),
    ),
    claims=(
        _better("recurrence is better than a longer segment (full loss)", XL, LONGER),
        _better("recurrence is better than a longer segment (half loss)", XL_HALF, LONGER_HALF),
    ),
    notes=(
        "rows without recurrence are fed 176/128 and 172/128 times as many tokens at once, the paper's own lengths over its 128; lanes and steps are the"
        " same, so these rows read more text, which favours them",
    ),
)


def run_ablation(study: Ablation, setting: Setting) -> Report:
    base = setting.scale.ablation if study.base == "ablation" else setting.scale.sentences
    store = setting.store(base)
    if study.base == "sentences":
        store = in_sentences(store, out=setting.out)
    split, unit = setting.test(store), store.manifest.unit
    results: dict[str, list[Result]] = {row.variant.name: [] for row in study.rows}
    with progress(setting.study, total=len(study.rows) * setting.seeds, unit="models") as done:
        # Seed by seed: who stops halfway has whole tables of fewer seeds, not half a table.
        for seed in range(1, setting.seeds + 1):
            for row in study.rows:
                done(0, note=f"{row.variant.name}, seed {seed}")
                asked = variant_model(base, row.variant, store=store, seed=seed)
                model = trained(setting, asked, store=store, seed=seed)
                segment = variant_model(base, XL, store=store, seed=seed).config.training.segment
                results[row.variant.name].append(measured(model, split, setting=setting, unit=unit, segment=segment))
                done(1)
    return report(study, setting, results, store=store, split=split)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One model of one seed."""

    trained: Trained
    init: attention.Point
    points: tuple[attention.Point, ...]
    unit: str

    @property
    def best(self) -> attention.Point:
        return attention.best_point((self.init, *self.points), unit=self.unit)

    @property
    def seconds(self) -> float:
        return self.trained.seconds + sum(point.seconds for point in (self.init, *self.points))


def measured(model: Trained, split: Split, *, setting: Setting, unit: str, segment: int) -> Result:
    lengths = attention.sweep_lengths(model.asked.config, segment=segment)

    def compute() -> dict[str, Any]:
        weights = model.load(device=setting.device).model
        assert isinstance(weights, TransformerXL), "every row is a variant of it"
        with progress(f"evaluating {model.asked.name}", total=(len(lengths) + 1) * (len(split) - 1)) as advance:
            init = attention.as_trained(weights, split, config=model.asked.config, unit=unit, advance=advance)
            points = [
                attention.at_attention(weights, split, attention=length, unit=unit, advance=advance)
                for length in lengths
            ]
        return {"init": init.as_json(), "points": [point.as_json() for point in points]}

    key = {"tokens": len(split), "lengths": lengths, "unit": unit}
    found = remembered(model.folder, "attention", key=key, compute=compute)
    points = tuple(attention.Point(**point) for point in found["points"])
    return Result(trained=model, init=attention.Point(**found["init"]), points=points, unit=unit)


def report(
    study: Ablation, setting: Setting, results: dict[str, list[Result]], *, store: Store, split: Split
) -> Report:
    unit = store.manifest.unit
    digits, name = DIGITS[unit], UNIT_NAMES[unit]
    columns = {
        row: {
            "init": [result.init.value for result in found],
            "best": [result.best.value for result in found],
            "attention": [float(result.best.attention) for result in found],
            "trained_attention": [float(attention.trained_attention(result.trained.asked.config)) for result in found],
        }
        for row, found in results.items()
    }
    rows = []
    for row in study.rows:
        found, config = columns[row.variant.name], results[row.variant.name][0].trained.asked.config
        cells = {
            "model": row.title or "-",
            "fed at once": f"{attention.fed_at_once(config)}",
            "recurrence": "yes" if row.variant.recurrence else "no",
            "encoding": ENCODING_NAMES[row.variant.encoding],
            "loss": row.variant.loss,
            f"{name}, as trained": mean_and_spread(found["init"], digits=digits),
            f"{name}, best": mean_and_spread(found["best"], digits=digits),
            "attention length": several(found["attention"]),
            "paper: as trained": "" if row.paper_init is None else f"{row.paper_init:.2f}",
            "paper: best": f"{row.paper_best:.2f}",
            "paper: attention length": "" if row.paper_attention is None else f"{row.paper_attention}",
        }
        rows.append(cells)
    everyone = [result for found in results.values() for result in found]
    return Report(
        title=study.title,
        corpus=f"Corpus: {store.manifest.name} ({store.manifest.rule}); the first {len(split):,} tokens of its test split. The paper's figures are"
        f" perplexities on {'One Billion Word' if study.base == 'sentences' else 'WikiText-103'}.",
        rows=rows,
        claims=[(claim.text, claim.verdict(columns)) for claim in study.claims],
        notes=[*notes(setting, everyone), *study.notes],
        commands=[
            (row_title(row.variant), row_commands(results[row.variant.name], setting, store=store, tokens=len(split)))
            for row in study.rows
        ],
        pictures=drawn(study, setting, results, name=name),
        seconds=sum(result.seconds for result in everyone),
        values={"unit": unit, "rows": [row_json(row, results[row.variant.name]) for row in study.rows]},
    )


def notes(setting: Setting, results: Sequence[Result]) -> list[str]:
    first = results[0].trained.asked.config.training
    sweep = ", ".join(f"{share:g}" for share in attention.SWEEP)
    lines = [
        f"every model takes {first.steps:,} steps of {first.lanes} lanes; full and half loss are fed the same number of tokens a step and cost the same;"
        " half loss scores half of them, and so moves through half as much text",
        "as trained: rows with recurrence with the segments and memory of training; rows without it at an attention length of one segment",
        f"best: the lowest of a sweep over {sweep} times the segment, every token seeing as many keys, and of the figure as trained",
        "attention length: the shortest that attains the best figure to the digits shown, itself included; longer than trained with means longer than the memory and"
        " the tokens fed at once of training together",
        "relative and Shaw rows without recurrence are evaluated with a memory as long as the attention length, which their weights allow; Vaswani and"
        " Al-Rfou rows in windows of that length whose last half is scored, as half loss trains them (a window for each token would cost as many times"
        " more as a window has tokens)",
        "Al-Rfou's encoding has learned no positions past its training length, so its sweep ends there",
    ]
    if setting.seeds > 1:
        lines.append(
            "±: how far the farthest seed lies from the mean; a claim appears where every seed of one side beats every seed of the other"
        )
    else:
        lines.append("one seed a row: an ordering may be chance, and no spread is known")
    lines += sorted({f"rule {result.init.rule}" for result in results})
    return lines


def row_title(variant: Variant) -> str:
    recurrence = "recurrence" if variant.recurrence else "no recurrence"
    return f"{ENCODING_NAMES[variant.encoding]}, {recurrence}, {variant.loss} loss"


def row_commands(found: Sequence[Result], setting: Setting, *, store: Store, tokens: int) -> list[str]:
    """Of the first seed; the others differ in one word and the run's name."""
    model, best = found[0].trained, found[0].best
    commands = [model.asked.command(data=store.folder, run=model.folder, device=setting.device)]
    if attention.has_windows(model.asked.config):
        commands.append(f"# its windows are read by: {setting.command}")
    else:
        words = ["txl", "evaluate", str(model.folder), "--tokens", str(tokens), *on_device(setting.device)]
        commands.append(evaluate := shlex.join(words))
        if best != found[0].init:
            commands.append(f"{evaluate} --segment {best.attention} --memory {best.attention} --same-length")
    others = [f"--training.seed {result.trained.seed} --run {result.trained.folder}" for result in found[1:]]
    return [*commands, *(f"# the same with {words}" for words in others)]


def row_json(row: Row, found: Sequence[Result]) -> dict[str, Any]:
    variant = row.variant
    return {
        "model": variant.name,
        "title": row.title,
        "recurrence": variant.recurrence,
        "encoding": variant.encoding,
        "loss": variant.loss,
        "fed_at_once": attention.fed_at_once(found[0].trained.asked.config),
        "paper": {"init": row.paper_init, "best": row.paper_best, "attention": row.paper_attention},
        "seeds": [
            {
                "seed": result.trained.seed,
                "run": str(result.trained.folder),
                "training_seconds": result.trained.seconds,
                "tokens_scored": result.trained.tokens,
                "init": result.init.as_json(),
                "best": result.best.as_json(),
                "sweep": [point.as_json() for point in result.points],
            }
            for result in found
        ],
    }


def drawn(study: Ablation, setting: Setting, results: dict[str, list[Result]], *, name: str) -> list[Path]:
    lines = {}
    for row in study.rows:
        found = results[row.variant.name]
        lengths = [point.attention for point in found[0].points]
        means = [sum(result.points[place].value for result in found) / len(found) for place in range(len(lengths))]
        lines[row.variant.name] = (lengths, means, "o-" if row.variant.recurrence else "o--")
    title = study.title.split(" (")[0]
    return draw_lines(setting.place(".png"), lines, title=title, x="attention length in evaluation", y=name)
