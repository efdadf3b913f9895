"""An ablation as a page: its table, what the paper claims with effect and interval, its pictures, and the commands of every row."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.data.store import Store
from transformer_xl.evaluation import UNIT_NAMES
from transformer_xl.pictures import draw_lines
from transformer_xl.studies import lengths as attention
from transformer_xl.studies.lengths import Point
from transformer_xl.studies.models import Variant, on_device
from transformer_xl.studies.report import Report, mean_and_spread
from transformer_xl.studies.runs import Setting
from transformer_xl.studies.tables import LENGTHENED, Ablation, Row, column_at
from transformer_xl.studies.verdicts import FEWEST_SEEDS, Column, Columns

if TYPE_CHECKING:
    from transformer_xl.studies.ablation import Result, Texts

ENCODING_NAMES = {"relative": "Ours", "shaw": "Shaw", "absolute": "Vaswani", "per_layer": "Al-Rfou"}
STEEPEST = 1.25
"""How many times the best figure a picture still shows."""
DIGITS = {"perplexity_per_word": 2, "bits_per_character": 3, "bits_per_byte": 3}

Results = Mapping[str, Sequence["Result"]]
"""By the name of a row: one for each seed."""


def make_report(study: Ablation, setting: Setting, results: Results, *, store: Store, texts: "Texts") -> Report:
    unit = texts.unit
    columns = columns_of(results, unit=unit)
    claims = [*study.claims, *(study.lengthened.claims if study.lengthened else ())]
    everyone = [result for found in results.values() for result in found]
    commands = [
        (row_title(row.variant), row_commands(results[row.variant.name], setting, store=store, texts=texts))
        for row in study.rows
    ]
    if study.lengthened:
        commands.append(("The standard model", row_commands(results[LENGTHENED], setting, store=store, texts=texts)))
    return Report(
        title=study.title,
        corpus=f"Corpus: {store.manifest.name} ({store.manifest.rule}); the first {len(texts.valid):,} tokens of its valid split and the first"
        f" {len(texts.test):,} of its test split. The paper's figures are perplexities on the valid split of"
        f" {'One Billion Word' if study.base == 'sentences' else 'WikiText-103'}.",
        rows=[
            *(cells_of(row, results[row.variant.name], unit=unit) for row in study.rows),
            *lengthened_rows(study, results, unit=unit),
        ],
        claims=[claim.told(columns) for claim in claims],
        digits=DIGITS[unit],
        notes=[*notes(setting, everyone, texts=texts), *study.notes],
        commands=commands,
        pictures=drawn(study, setting, results, name=UNIT_NAMES[unit]),
        seconds=sum(result.seconds for result in everyone),
        values={"unit": unit, "rows": values_of(study, results)},
    )


def columns_of(results: Results, *, unit: str) -> Columns:
    """What claims are about: figures of test, at lengths that were chosen on valid."""
    return {
        row: {
            name: Column(
                blocks=[result.told[name].blocks for result in found],
                unit=unit,
                per_nat=found[0].told[name].value / found[0].told[name].loss_nats,
            )
            for name in found[0].told
            if all(name in result.told for result in found)
        }
        for row, found in results.items()
    }


# --- the table


def cells_of(row: Row, found: Sequence["Result"], *, unit: str) -> dict[str, str]:
    config, name = found[0].trained.asked.config, UNIT_NAMES[unit]
    return {
        "model": row.title or "-",
        "fed at once": f"{attention.fed_at_once(config)}",
        "recurrence": "yes" if row.variant.recurrence else "no",
        "encoding": ENCODING_NAMES[row.variant.encoding],
        "loss": row.variant.loss,
        f"valid {name}, as trained": spread([result.init for result in found], unit=unit),
        "valid, best": spread([result.best for result in found], unit=unit),
        "attention length": " or ".join(dict.fromkeys(result.best.length for result in found)),
        f"test {name}, as trained": spread([result.told["init"] for result in found], unit=unit),
        "test, at that length": spread([result.told["best"] for result in found], unit=unit),
        "a window for each token (as trained)": windows_of(found, unit=unit),
        "paper: as trained": "" if row.paper_init is None else f"{row.paper_init:.2f}",
        "paper: best": "" if row.paper_best is None else f"{row.paper_best:.2f}",
        "paper: attention length": "" if row.paper_attention is None else f"{row.paper_attention}",
    }


def lengthened_rows(study: Ablation, results: Results, *, unit: str) -> list[dict[str, str]]:
    block = study.lengthened
    if block is None:
        return []
    found = results[LENGTHENED]
    config, rows = found[0].trained.asked.config, []
    for share, (paper, length) in sorted(block.paper.items(), reverse=True):
        told = [result.told[column_at(share)] for result in found]
        valid = [
            next(point for point in result.points if point.attention == one.attention)
            for result, one in zip(found, told, strict=True)
        ]
        rows.append(
            {
                "model": f"standard, {share:.3g} times its attention",
                "fed at once": f"{attention.fed_at_once(config)}",
                "recurrence": "yes",
                "encoding": ENCODING_NAMES["relative"],
                "loss": "full",
                "as trained": spread([result.init for result in found], unit=unit),
                "at this length": spread(valid, unit=unit),
                "attention length": told[0].length,
                "test, as trained": spread([result.told["init"] for result in found], unit=unit),
                "test, at this length": spread(told, unit=unit),
                "windows": "",
                "paper: as trained": f"{block.paper_init:.2f}",
                "paper: best": f"{paper:.2f}",
                "paper: attention length": f"{length}",
            }
        )
    return rows


def spread(points: Sequence[Point], *, unit: str) -> str:
    return mean_and_spread([point.value for point in points], digits=DIGITS[unit])


def windows_of(found: Sequence["Result"], *, unit: str) -> str:
    if not found[0].windows:
        return ""
    sliding, level = ([result.windows[name] for result in found] for name in ("sliding", "level"))
    return f"{spread(sliding, unit=unit)} ({spread(level, unit=unit)})"


# --- how


def notes(setting: Setting, results: Sequence["Result"], *, texts: "Texts") -> list[str]:
    first = results[0].trained.asked.config.training
    sweep = ", ".join(f"{share:g}" for share in attention.SWEEP)
    lines = [
        f"every model takes {first.steps:,} steps of {first.lanes} lanes, those called so twice as many; full and half loss are fed the same number of tokens a"
        " step and cost the same; half loss scores half of them, and so moves through half as much text: with twice the steps through as much",
        "as trained: rows with recurrence with the segments and memory of training; rows without it at an attention length of one segment",
        f"best: the lowest on valid of a sweep over {sweep} times the segment and the trained length, every token seeing as many keys, and of the figure as"
        " trained; with our encoding, lengths beyond the trained one also with distances clamped at it. Test is read at that length alone",
        "attention length: the shortest that attains the best figure to the digits shown, itself included",
        "relative and Shaw rows without recurrence are evaluated with a memory as long as the attention length, which their weights allow; Vaswani and"
        " Al-Rfou rows in windows of that length whose last half is scored, as half loss trains them",
        f"a window for each token: the rule of Section 3.1 for models without memory, one segment long, on the first {len(texts.beginning):,} tokens of test, and in"
        " brackets the figure as trained on the same tokens; it costs as many times more as a window has tokens",
        "Al-Rfou's encoding has learned no positions past its training length, so its sweep ends there",
        "effect: how much lower the better figure is, on test, each row at the length that was chosen on valid; a longer attention: the best on valid of those"
        " beyond the trained one, beside the trained one by the same rule. In brackets what 95 of 100 draws of seeds and of places in the text lie within",
        f"a claim appears where the interval lies above zero, does not where it lies below, and cannot be told otherwise or with fewer than {FEWEST_SEEDS} seeds;"
        " that something does not gain appears where the interval has nothing above zero",
    ]
    if setting.seeds > 1:
        lines.append("±: how far the farthest seed lies from the mean")
    lines += sorted({f"rule {result.init.rule}" for result in results})
    return lines


def row_title(variant: Variant) -> str:
    recurrence = "recurrence" if variant.recurrence else "no recurrence"
    longer = ", twice the steps" * (variant.steps > 1)
    return f"{ENCODING_NAMES[variant.encoding]}, {recurrence}, {variant.loss} loss{longer}"


def row_commands(found: Sequence["Result"], setting: Setting, *, store: Store, texts: "Texts") -> list[str]:
    """Of the first seed; the others differ in one word and the run's name."""
    model, best = found[0].trained, found[0].best
    commands = [model.asked.command(data=store.folder, run=model.folder, device=setting.device)]
    if attention.has_windows(model.asked.config):
        commands.append(f"# its windows are read by: {setting.command}")
    else:
        words = ["txl", "evaluate", str(model.folder), "--split", "valid", "--tokens", str(len(texts.valid))]
        commands.append(evaluate := shlex.join([*words, *on_device(setting.device)]))
        if best != found[0].init:
            clamp = f" --clamp-len {best.clamp}" * bool(best.clamp)
            commands.append(f"{evaluate} --segment {best.attention} --memory {best.attention} --same-length{clamp}")
    others = [f"--training.seed {result.trained.seed} --run {result.trained.folder}" for result in found[1:]]
    return [*commands, *(f"# the same with {words}" for words in others)]


# --- for programs, and to look at


def values_of(study: Ablation, results: Results) -> list[dict[str, Any]]:
    rows = []
    for row in study.rows:
        found, variant = results[row.variant.name], row.variant
        about = {
            "model": variant.name,
            "title": row.title,
            "recurrence": variant.recurrence,
            "encoding": variant.encoding,
            "loss": variant.loss,
            "fed_at_once": attention.fed_at_once(found[0].trained.asked.config),
            "paper": {"init": row.paper_init, "best": row.paper_best, "attention": row.paper_attention},
        }
        rows.append({**about, "seeds": [seed_json(result) for result in found]})
    if study.lengthened:
        paper = {
            column_at(share): {"value": value, "attention": length}
            for share, (value, length) in study.lengthened.paper.items()
        }
        rows.append(
            {"model": LENGTHENED, "paper": paper, "seeds": [seed_json(result) for result in results[LENGTHENED]]}
        )
    return rows


def seed_json(result: "Result") -> dict[str, Any]:
    return {
        "seed": result.trained.seed,
        "run": str(result.trained.folder),
        "training_seconds": result.trained.seconds,
        "tokens_scored": result.trained.tokens,
        "init": result.init.as_json(),
        "best": result.best.as_json(),
        "sweep": [point.as_json() for point in result.points],
        "test": {name: point.as_json() for name, point in result.told.items()},
        "windows": {name: point.as_json() for name, point in result.windows.items()},
    }


def drawn(study: Ablation, setting: Setting, results: Results, *, name: str) -> list[Path]:
    """The sweep on valid, unclamped: the mean over seeds."""
    lines = {}
    for row in study.rows:
        found = results[row.variant.name]
        places = [place for place, point in enumerate(found[0].points) if not point.clamp]
        means = [sum(result.points[place].value for result in found) / len(found) for place in places]
        lengths = [found[0].points[place].attention for place in places]
        lines[row.variant.name] = (lengths, means, "o-" if row.variant.recurrence else "o--")
    title = study.title.split(" (")[0]
    # An absolute encoding falls apart past its length, and would press all others together.
    highest = STEEPEST * min(min(values) for _, values, _ in lines.values())
    x, y = "attention length in evaluation", f"{name} on valid"
    return draw_lines(setting.place(".png"), lines, title=title, x=x, y=y, highest=highest)
