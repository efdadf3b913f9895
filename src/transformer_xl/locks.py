"""One process at a time: a file that whoever works on something holds. The system lets go of it when the process dies, however it dies."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from transformer_xl.console import say
from transformer_xl.errors import TransformerXLError
from transformer_xl.files import open_plain


@contextmanager
def only_holder(lock: Path, *, what: str, taken: Callable[[str], TransformerXLError]) -> Iterator[None]:
    """Holds `lock`, which then says which process does. `taken`: what is raised where another holds it, given its number. `what`: what it guards, for
    systems that have no such locks."""
    if find_spec("fcntl") is None:  # Windows
        say(f"this system has no locks for files: see to it that nobody else uses {what} meanwhile")
        yield
        return
    import fcntl

    with open_plain(lock, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise taken(file.read().strip() or "unknown") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
