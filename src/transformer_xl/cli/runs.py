"""The runs in a folder: how large, how far, how long, how good, on what, when. Nothing is loaded. The model in the box is
not among them: it lies in the package, and is what a command reads with that is given no RUN.

txl runs
txl runs experiments --json
"""

import argparse
import json
from pathlib import Path

from transformer_xl.cli.data import table
from transformer_xl.errors import InputError


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, nargs="?", default=Path("runs"), metavar="DIR", help="looked through (default: runs)")
    add("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    from transformer_xl.evaluation import UNIT_NAMES
    from transformer_xl.training.run_summary import find_runs, summarise

    place = arguments.folder
    if not place.is_dir():
        raise InputError(f"there is no folder {place}; name the one that your runs lie in: txl runs DIR")
    found = [summarise(folder) for folder in find_runs(place)]
    if arguments.json:
        print(json.dumps([one.as_json() for one in found], indent=2, ensure_ascii=False))
        return 0
    if not found:
        raise InputError(f"{place} holds no run; train one with: txl train PRESET --data DIR --run {place}/first")
    rows = [
        (
            str(Path(one.folder).relative_to(place)) if Path(one.folder) != place else one.folder,
            f"{one.parameters:,}",
            f"{one.step:,} of {one.steps:,}",
            "" if one.minutes is None else f"{one.minutes:,.1f}",
            "" if one.best is None else f"{one.best:,.4f} {UNIT_NAMES[one.unit]}",
            one.data,
            one.changed,
        )
        for one in found
        if one.problem is None
    ]
    if rows:
        print(table(("run", "parameters", "steps", "minutes", "best valid", "data", "changed"), rows, left=("data",)))
    for one in found:
        if one.problem is not None:
            print(f"{one.folder}: {one.problem}")
    return 0
