"""The model that a command reads with: the run that was named, or the model in the box."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


@contextmanager
def store_of_text(loaded: "Loaded", text: str) -> Iterator[Path]:
    """A text as a store of the model's own tokens, all of it the split `train`, for as long as it is needed."""
    from transformer_xl.data.corpora.own_text import OwnText, prepare_own_text

    with tempfile.TemporaryDirectory(prefix="txl-text-") as folder:
        settings = OwnText(existing=loaded.tokenizer, shares=(1.0,))
        prepare_own_text([text], out=Path(folder) / "store", settings=settings)
        yield Path(folder) / "store"
