"""The model that a command reads with: the run that was named, or the model in the box."""

import argparse
from typing import TYPE_CHECKING, Any

from transformer_xl.console import say

if TYPE_CHECKING:
    from transformer_xl.library import Loaded

RUN_HELP = (
    "a run's folder, or one of its checkpoints. None, or the word box: the model in the box, which comes with the package"
    " (something here that is called box comes first)"
)


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help=RUN_HELP)


def load_named(run: str | None, **how: Any) -> "Loaded":
    """`how`: what loading takes besides. Where no run was named, a line says what is read with."""
    from transformer_xl.library import load

    loaded = load(run, **how)
    if run is None:
        say("no run is named: reading with the model in the box")
    return loaded
