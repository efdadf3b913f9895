"""Writing so that a reader sees the whole or nothing, and checksums. Knows no format.

temporary file beside the target -> write -> fsync -> rename over the target -> fsync the folder
"""

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 20
TEMPORARY = ".txl-partial-"


@contextmanager
def atomic_file(path: Path | str, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file that appears at `path` only when the block ends without an error; on any error nothing is left behind."""
    path = Path(path)
    if not path.parent.is_dir():  # said here, for the temporary file's own error would name a file nobody asked for
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(path.parent))
    descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY, suffix=path.suffix, dir=path.parent)
    try:
        # The same bytes on every system: a vocabulary's lines end in \n.
        as_text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
        with os.fdopen(descriptor, mode, **as_text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~current_umask())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        name_the_path(error, path)
        raise


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """A folder that appears at `path`, replacing an older one, only when the block ends without an error."""
    path = Path(path)
    made = [parent for parent in path.absolute().parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=path.parent))
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            if file.is_file():
                sync_file(file)
        os.chmod(temporary, 0o777 & ~current_umask())
        sync_folder(temporary)
        if path.exists():
            # A folder cannot be renamed over a full one: the old one steps aside, and goes only once the new one stands.
            aside = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=path.parent))
            os.replace(path, aside / path.name)
            os.replace(temporary, path)
            shutil.rmtree(aside)
        else:
            os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        name_the_path(error, path)
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # somebody else put something there meanwhile
                parent.rmdir()
        raise


def name_the_path(error: BaseException, path: Path) -> None:
    """A write that fails on an open file says why, but not where; and nobody knows a temporary file by its name."""
    if isinstance(error, OSError) and (error.filename is None or TEMPORARY in str(error.filename)):
        error.filename, error.filename2 = str(path), None


def write_text(path: Path | str, text: str) -> None:
    with atomic_file(path, "w") as file:
        file.write(text)


def write_json(path: Path | str, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync_file(path: Path) -> None:
    with path.open("r+b" if sys.platform == "win32" else "rb") as file:  # Windows writes out only what may be written
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    if sys.platform == "win32":  # where a folder cannot be opened, and its names are written out with its files
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def digest(path: Path | str, algorithm: str = "sha256") -> str:
    """The hexadecimal checksum of a file, read in pieces."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()
