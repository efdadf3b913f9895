"""The one door to making a store: it appears whole at its place or not at all, whatever goes wrong on the way."""

import errno
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from transformer_xl.data.store import MANIFEST, Manifest, Store, finish_store, open_store
from transformer_xl.data.text.tokenizers import Tokenizer
from transformer_xl.errors import DataError
from transformer_xl.files import atomic_folder, put_back


@contextmanager
def store_folder(out: Path) -> Iterator[Path]:
    """A folder to fill that becomes `out`. What goes wrong in writing it is said in one sentence.

    Everything that reads text raises DataError by itself, so an OSError that arrives here is about the target.
    """
    out = out.resolve()  # a link to a larger disk is followed, not replaced
    put_back(out)
    if out.exists() and not (out / MANIFEST).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists and is no data store; choose another `out=`, or remove it first")
    try:
        with atomic_folder(out) as folder:
            yield folder
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DataError(f"no space left for {out}; free some, or choose another `out=`") from error
        raise DataError(f"{out} cannot be written: {error.strerror or error}; choose another `out=`") from error


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A place for unpacked files inside the folder being made: it goes away with it, also when things go wrong."""
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=folder) as scratch:
        yield Path(scratch)


Fill = Callable[[Path, Path], tuple[Manifest, Tokenizer]]
"""(folder of the store, scratch folder) -> what was written there."""


def make_store(out: Path | str, fill: Fill) -> Store:
    out = Path(out)
    with store_folder(out) as folder:
        with scratch_folder(folder) as scratch:
            manifest, tokenizer = fill(folder, scratch)
        finish_store(folder, manifest=manifest, tokenizer=tokenizer)
    return open_store(out)
