"""Runs side by side: their figures on one text under one rule, and their curves in one picture.

    txl compare runs/small runs/large                       on the test split that both were trained beside
    txl compare runs/bytes runs/pairs --text held-out.txt   models with other tokenizers, too: bits per byte of one text
    txl compare runs/small runs/large --memory 256 --plot curves.png

Every model reads with its own lengths unless --segment and --memory give all of them the same; where that makes two rules, it is said."""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_xl.cli.data import table
from transformer_xl.cli.devices import add_device, say_device
from transformer_xl.cli.models import add_field, store_of_text
from transformer_xl.console import say
from transformer_xl.errors import ConfigError, DataError, InputError, shown

if TYPE_CHECKING:
    from transformer_xl.evaluation import Figures
    from transformer_xl.library import Loaded


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="two or more runs, or checkpoints")
    add(
        "--data",
        metavar="DIR",
        help="a store made with the tokenizer of all of them, where not the one they were trained on",
    )
    add("--split", default="test", help="train, valid or test (default)")
    add("--text", metavar="PATH", help="a text instead, which each reads in its own tokens")
    add_field(parser)
    add("--segment", metavar="T", type=int, help="tokens read at once, by all")
    add("--memory", metavar="M", type=int, help="positions remembered, by all")
    add("--tokens", metavar="N", type=int, help="only the first N tokens (of the first run's, where they have others)")
    add("--plot", type=Path, metavar="FILE", help="the curves (default: compare.png, where matplotlib is installed)")
    add_device(parser)
    add("--json", action="store_true", help="print everything as JSON")


@dataclass(frozen=True, kw_only=True)
class Compared:
    name: str
    loaded: "Loaded"
    figures: "Figures"


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.library import load

    names = arguments.runs
    if len(names) < 2 or len({Path(name).resolve() for name in names}) < len(names):
        raise InputError(f"{names[0]} cannot be compared with itself; name two or more runs")
    if arguments.text is not None and arguments.data is not None:
        raise ConfigError("--text and --data are two texts; give one of them")
    if arguments.text == "-":
        raise ConfigError("--text -: each run reads the text anew, and standard input can be read once; give a file")
    if arguments.text is None and arguments.field:
        raise ConfigError(f"--field {arguments.field[0]} is for a --text of records; leave it out")
    if arguments.plot is not None and not arguments.plot.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {arguments.plot.parent}; make it first")
    if arguments.text is not None and arguments.tokens is not None:
        raise ConfigError("--tokens is for splits of stores; give a shorter --text")
    if arguments.tokens is not None and arguments.tokens < 2:
        raise ConfigError(f"--tokens: {shown(arguments.tokens)} leaves nothing to predict; take at least 2")
    models = {name: load(name, device=arguments.device) for name in names}
    compared = of_text(arguments, models) if arguments.text is not None else of_split(arguments, models)
    warnings = [*differences(compared), *(unknowns(compared) if arguments.text is not None else [])]
    plot = draw(arguments, models)
    say_device(arguments, models[names[0]])
    rows = [as_row(one) for one in compared]
    if arguments.json:
        print(json.dumps({"runs": rows, "warnings": warnings, "plot": plot and str(plot)}, indent=2))
    else:
        show(arguments, compared)
        print(*([f"plot: {plot}"] if plot else []), sep="\n", end="\n" if plot else "")
    for warning in warnings:
        say(f"careful: {warning}")
    return 0


# --- one text


def of_split(arguments: argparse.Namespace, models: dict[str, "Loaded"]) -> list[Compared]:
    """One split of one store, whose tokens all of them read."""
    stores = {name: loaded.store(arguments.data) for name, loaded in models.items()}
    texts = {}
    for name, store in stores.items():
        store.split(arguments.split)
        (record,) = (one for one in store.manifest.splits if one.name == arguments.split)
        texts[name] = sorted((file.name, file.sha256) for file in record.files)
    first, *others = models
    for name in others:
        if texts[name] != texts[first]:
            raise DataError(
                f"{first} and {name} have other {arguments.split} texts ({stores[first].folder} and {stores[name].folder}), and figures of two"
                " texts cannot be compared; give one with --text FILE, or a store for both with --data DIR"
            )
    return [evaluated(arguments, name, loaded, arguments.data, arguments.split) for name, loaded in models.items()]


def of_text(arguments: argparse.Namespace, models: dict[str, "Loaded"]) -> list[Compared]:
    """The same bytes, in the tokens of each."""
    found = []
    for name, loaded in models.items():
        with store_of_text(loaded, arguments.text, field=arguments.field) as store:
            found.append(evaluated(arguments, name, loaded, store, "train"))
    return found


def evaluated(
    arguments: argparse.Namespace, name: str, loaded: "Loaded", data: Path | str | None, split: str
) -> Compared:
    from transformer_xl.console import progress

    asked = {"segment": arguments.segment, "memory": arguments.memory, "tokens": arguments.tokens}
    with progress(f"evaluating {name}", total=None, unit="tokens") as advance:
        figures = loaded.evaluate(data=data, split=split, **asked, advance=advance)
    return Compared(name=name, loaded=loaded, figures=figures)


# --- what must be known beside the figures


def differences(compared: list[Compared]) -> list[str]:
    """Where the rules are not one."""
    told = dict[str, list[str]]()
    for one in compared:
        told.setdefault(replace(one.figures.rule, lanes=1).sentence(), []).append(one.name)
    if len(told) < 2:
        return []
    rules = "; ".join(f"{', '.join(names)}: {rule}" for rule, names in told.items())
    return [
        f"these figures were made by {len(told)} rules, so part of a difference may be theirs ({rules}); --segment and --memory make them one"
    ]


def unknowns(compared: list[Compared]) -> list[str]:
    """Tokenizers that do not keep the whole text, whose bits are therefore not those of its bytes."""
    found = []
    for one in compared:
        tokenizer = one.loaded.tokenizer
        if tokenizer.kind in ("word", "number"):
            found.append(
                f"{one.name} reads words, of which those it does not know are all one: its bits per byte look better than they are"
            )
        elif getattr(tokenizer, "lower", False):
            found.append(
                f"{one.name} reads the text in lower case, which is easier: its bits per byte look better than they are"
            )
    return found


# --- told


def as_row(one: Compared) -> dict[str, object]:
    from transformer_xl.model import parameter_count

    about = one.loaded.checkpoint.about
    return {
        "run": one.name,
        "parameters": parameter_count(one.loaded.config.model),
        "step": about.step,
        "trained_on": about.corpus,
        "unit": about.unit,
        "value": one.figures.value(about.unit),
        **one.figures.as_json(),
    }


def show(arguments: argparse.Namespace, compared: list[Compared]) -> None:
    best = min(one.figures.bits_per_byte for one in compared)
    rows = [
        (
            one.name,
            f"{as_row(one)['parameters']:,}",
            f"{one.loaded.checkpoint.about.step:,}",
            f"{one.figures.bits_per_byte:.4f}",
            "best"
            if one.figures.bits_per_byte <= best
            else f"{one.figures.bits_per_byte / best - 1:+.2%}"
            if best
            else "",
            f"{one.figures.perplexity:,.2f}",
            f"{one.figures.tokens / max(one.figures.seconds, 1e-9):,.0f}",
            one.loaded.checkpoint.about.corpus,
        )
        for one in compared
    ]
    titles = ("run", "parameters", "step", "bits per byte", "worse by", "perplexity", "tokens/s", "trained on")
    print(table(titles, rows, left=("trained on",)))
    text = arguments.text or f"{arguments.split} of {arguments.data or compared[0].loaded.checkpoint.about.data}"
    print(f"text: {text}")
    print(f"rule {replace(compared[0].figures.rule, lanes=1).sentence()}")


STYLES: dict[str, dict[str, object]] = {
    "train": {"linewidth": 0.8, "alpha": 0.5},
    "validation": {"marker": "o", "markersize": 4, "linewidth": 1.4},
}
STEEPEST = 2.5
"""How many times the best figure is still shown: every curve begins far above."""


def draw(arguments: argparse.Namespace, models: dict[str, "Loaded"]) -> Path | None:
    from transformer_xl.pictures import can_draw, panels
    from transformer_xl.training.run_summary import curves_of

    runs = {name: loaded.checkpoint.run for name, loaded in models.items()}
    curves = {name: curves_of(run) for name, run in runs.items() if run is not None}
    known = [bits for pair in curves.values() for curve in pair.values() for bits in curve.bits.tolist()]
    if not known or (arguments.plot is None and not can_draw()):
        return None
    path = arguments.plot or Path("compare.png")
    title = "validation (dots) and training (thin) of each run on its own data"
    with panels(path, title=title, count=2, columns=2) as both:
        for axes, x in zip(both, ("steps", "minutes"), strict=True):
            for number, (name, pair) in enumerate(curves.items()):
                for kind, curve in pair.items():
                    label = name if kind == "validation" else None
                    axes.plot(getattr(curve, x), curve.bits, color=f"C{number}", label=label, **STYLES[kind])
            axes.set_ylim(top=min(max(known), STEEPEST * min(known)))
            axes.set_xlabel(x)
            axes.set_ylabel("bits per byte")
            axes.grid(True, alpha=0.3)
            axes.legend(fontsize=8)
    return path
