"""Losses by context length at rest: a .npz with an array c<length> for each, in corpus order, and `about`, a JSON text that says what made them.

Files of others need no `about`. Nothing is ever unpickled.
"""

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transformer_xl.errors import DataError
from transformer_xl.files import atomic_file

ABOUT = "about"
LENGTH = re.compile(r"c(\d+)")
WAY_OUT = "give a .npz with an array c<length> for each context length"
UNREADABLE = (ValueError, EOFError, KeyError, zipfile.BadZipFile)
Arrays = dict[str, NDArray[Any]]


def write_arrays(path: Path, arrays: Arrays, *, about: dict[str, Any]) -> None:
    with atomic_file(path) as file:
        np.savez(file, allow_pickle=False, **{**arrays, ABOUT: np.array(json.dumps(about))})


def read_arrays(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """All arrays of a file, and what it says of itself: nothing, where it is not ours."""
    with path.open("rb") as stream:  # opened here, for numpy leaves a file that is no .npz open
        file = np.load(stream, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
        arrays = {name: file[name] for name in file.files}
    about = json.loads(str(arrays.pop(ABOUT))) if ABOUT in arrays else {}
    return arrays, about if isinstance(about, dict) else {}


def read_losses(path: Path) -> tuple[dict[int, NDArray[Any]], dict[str, Any]]:
    """Losses by context length, and what the file says of itself."""
    try:
        arrays, about = read_arrays(path)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; {WAY_OUT}") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder; {WAY_OUT}, and name runs before `losses=`") from None
    except UNREADABLE as error:
        # numpy tells people how to load what it refuses, which nobody should do.
        reason = "it is damaged, or holds Python objects" if "pickle" in str(error) else str(error)
        raise DataError(f"{path} cannot be read as losses ({reason}); {WAY_OUT}") from None
    losses = {int(match[1]): array for name, array in arrays.items() if (match := LENGTH.fullmatch(name))}
    if not losses:
        names = ", ".join(arrays) or "none"
        raise DataError(f"{path} has losses for no context length (its arrays: {names}); {WAY_OUT}")
    return losses, about
