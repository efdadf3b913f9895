"""A model of your own text in one command: looks at it, chooses tokens and a model for this machine and this time, says why, trains, and tells how it went.

    txl fit logs/                                       (ten minutes; everything lands in runs/logs)
    txl fit novel.txt --minutes 4 --run runs/novel
    txl fit src/ --include '*.py' --exclude tests
    txl fit mails.jsonl --field body
    txl fit new.log --from runs/logs                    (begins with the weights of a run, and its tokens)
    txl fit notes/ --from nothing                       (with no weights, whatever the model that comes with the package knows)

Stopped, the same command goes on."""

import argparse
import json
import sys
from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING

from transformer_xl.devices import AUTO, DEVICES_HELP

if TYPE_CHECKING:
    from pathlib import Path

    from transformer_xl.evaluation.lines import LineScore
    from transformer_xl.fitting.plan import Plan
    from transformer_xl.fitting.telling import Report

SHOWN = 100
"""Characters of a line."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="files, folders, archives; .jsonl, .csv, .parquet by record")
    add("--minutes", type=float, default=10.0, metavar="M", help="how long to train (10)")
    add("--run", metavar="RUN", help="the folder that everything lands in (runs/NAME of the text)")
    add(
        "--from",
        dest="origin",
        metavar="RUN",
        help="begin with the tokens, model and weights of this run; box: of the model in the box; nothing: with none (box, where it knows such text)",
    )
    add("--field", action="append", metavar="NAME", help="of records: what holds the text; may be repeated")
    add("--include", action="append", metavar="PATTERN", help="only such files; may be repeated")
    add("--exclude", action="append", metavar="PATTERN", help="neither such files nor folders; may be repeated")
    add("--gitignore", action="store_true", help="leave out what .gitignore files leave out")
    add("--binary", choices=("skip", "keep"), default="skip", help="files that are no text: left out, or taken")
    add("--device", default=AUTO, help=DEVICES_HELP)
    add("--json", action="store_true", help="print the plan and the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.data.corpora.selection import Inputs
    from transformer_xl.fitting import prepared, trained
    from transformer_xl.fitting.telling import report

    names = ("field", "include", "exclude")
    inputs = Inputs(
        **{name: tuple(getattr(arguments, name) or ()) for name in names},
        gitignore=arguments.gitignore,
        binary=arguments.binary,
    )
    wish = {"minutes": arguments.minutes, "run": arguments.run, "inputs": inputs, "device": arguments.device}
    folder, plan, store = prepared(arguments.paths, **wish, from_=arguments.origin)
    if not arguments.json:
        heading("Plan")
        print("\n".join(plan.reasons))
        print("as two commands:", *in_two(plan, folder), sep="\n  ")
        heading(f"Training for {plan.minutes:g} minutes")
    done = trained(folder, plan, store, device=arguments.device, command=in_one(plan, folder))
    if done.stopped:
        print("stopped and saved; the same command goes on from there", file=sys.stderr)
        return 130
    found = report(done, store, origin=plan.origin, device=arguments.device)
    if arguments.json:
        print(json.dumps({"run": str(folder), "plan": asdict(plan), "report": asdict(found)}, ensure_ascii=False))
        return 0
    show(found)
    heading("Next")
    print(f"  txl generate {folder} --tokens 300")
    print(f"  txl score {folder} FILE --by line --above 99%")
    print(f"  txl serve {folder}")
    print(f"\nLook at {folder}/README.md and {folder}/figures/.")
    return 0


def in_one(plan: "Plan", folder: "Path") -> str:
    begun = "" if plan.wish is None else f" --from {quote(plan.wish)}"
    return f"txl fit {texts_of(plan)} --minutes {plan.minutes:g} --run {quote(str(folder))}{begun}"


def in_two(plan: "Plan", folder: "Path") -> tuple[str, str]:
    """The two commands that a plan stands for."""
    store = quote(f"{folder}/data")
    size = "" if plan.vocabulary_size is None else f" --vocab-size {plan.vocabulary_size}"
    by_file = " --split-by file" * (plan.split_by == "file")
    tokens, start = f"--tokenizer {plan.tokenizer}{size}", plan.preset
    if plan.origin is not None:
        tokens, start = f"--tokenizer-of {quote(plan.origin)}", f"--from {quote(plan.origin)}"
    return (
        f"txl prepare {texts_of(plan)} --out {store} {tokens}{by_file}",
        f"txl train {start} --data {store} --run {quote(str(folder))} --minutes {plan.minutes:g}"
        + "".join(f" --{name} {quote(value)}" for name, value in plan.words),
    )


def texts_of(plan: "Plan") -> str:
    """Which texts, as they are typed."""
    words = [quote(path) for path in plan.paths]
    for name in ("field", "include", "exclude"):
        words += [f"--{name} {quote(word)}" for word in getattr(plan.inputs, name)]
    words += ["--gitignore"] * plan.inputs.gitignore + ["--binary keep"] * (plan.inputs.binary == "keep")
    return " ".join(words)


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def show(found: "Report") -> None:
    heading("Held-out text, bits per byte (lower is better)")
    references = found.references
    rows = (
        ("this model", found.bits_per_byte),
        *([] if found.before is None else [("the run it began with", found.before)]),
        ("5-grams of the same training text", references.ngram),
        ("xz -9 of it alone", references.xz_alone),
        ("xz -9 of it after the training text", references.xz),
        ("single bytes", references.single_bytes),
    )
    for name, bits in rows:
        print(f"  {name:<36}{bits:>7.3f}")
    print(f"{found.test_bytes:,} bytes that it never saw, each predicted from all that comes before it")
    if found.bits_per_byte >= references.ngram:
        print("It knows less of this text than 5-grams do: give it more --minutes.")
    for title, lines in (("Surprised it most", found.most), ("Surprised it least", found.least)):
        if not lines:
            continue
        heading(f"{title} (bits per byte)")
        for line in lines:
            print(f"  {line.bits_per_byte:6.2f}  {shortened(line)}")


def shortened(line: "LineScore") -> str:
    text = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in (line.text or "").strip()
    )
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "\N{HORIZONTAL ELLIPSIS}"
