"""The model that a command reads with: the run that was named, or the model in the box."""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
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


def add_field(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--field", action="append", metavar="NAME", help="of a --text of records: what holds the text; may be repeated"
    )


@contextmanager
def store_of_text(loaded: "Loaded", text: str, *, field: Sequence[str] | None = None) -> Iterator[Path]:
    """A text as a store of the model's own tokens, all of it the split `train`, for as long as it is needed. `field`: of records, what is read."""
    from transformer_xl.data.corpora.own_text import OwnText, prepare_own_text
    from transformer_xl.data.corpora.selection import Inputs

    with tempfile.TemporaryDirectory(prefix="txl-text-") as folder:
        settings = OwnText(existing=loaded.tokenizer, shares=(1.0,), inputs=Inputs(field=tuple(field or ())))
        prepare_own_text([text], out=Path(folder) / "store", settings=settings)
        yield Path(folder) / "store"
