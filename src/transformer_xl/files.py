"""Writing so that a reader sees the whole or nothing, and checksums. Knows no format.

temporary file beside the target -> write -> fsync -> rename over the target -> fsync the folder

A full folder cannot be renamed over, so the new one changes places with the old one in one call, where the system can; where it cannot, the old one
steps aside, and whoever comes next puts it back if the new one never came:

      .txl-partial-1f3a  data                .txl-partial-1f3a  data  .txl-aside-data
      new                old                 new                old   .
      old                new  (exchanged)    new                .     old  (killed here: put back)
      .                  new                 .                  new   old
                                             old                new   .
                                             .                  new   .

So nothing under `.txl-partial-` is ever the only copy of anything.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

TEMPORARY = ".txl-partial-"
ASIDE = ".txl-aside-"
AT_FDCWD = -100
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Neither to where a link leads nor waiting at a pipe, where a system has such things."""
PUT_BACK_SECONDS = 2.0
"""So long who only looks waits for somebody who holds what was moved aside: a rename takes no longer, and nobody may stop all others."""
POLL_SECONDS = 0.005
EXCHANGE = 2
"""RENAME_EXCHANGE of Linux' renameat2, and RENAME_SWAP of renamex_np on macOS."""


@contextmanager
def atomic_file(path: Path | str, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file that appears at `path` only when the block ends without an error; on any error nothing is left behind."""
    path = Path(path)
    if not path.parent.is_dir():  # said here, for the temporary file's own error would name a file nobody asked for
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(path.parent))
    with suppress(FileNotFoundError):  # a rename would put a plain file where a device, a pipe or a link has its name
        if not stat.S_ISREG(path.lstat().st_mode):
            raise _not_plain(str(path))
    clear_leftovers(path.parent)
    text = "b" not in mode  # the same bytes on every system: a vocabulary's lines end in \n
    with _naming(path), _hidden_file(path.parent, suffix=path.suffix) as (temporary, descriptor):
        encoding, newline = ("utf-8", "\n") if text else (None, None)
        with os.fdopen(descriptor, mode, encoding=encoding, newline=newline, closefd=False) as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
        sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """A folder that appears at `path` when the block ends without an error. An older one stands there, whole, until that moment: see above."""
    path = Path(path)
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            what = "this is a link or a file where a folder is to be written; remove it"
            raise NotADirectoryError(errno.ENOTDIR, what, str(path))
    made = [parent for parent in path.absolute().parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(path.parent)
    try:
        with _naming(path), hidden_folder(path.parent) as temporary:
            yield temporary
            sync_tree(temporary)
            _place(temporary, path)
            for folder in (path.parent, *(parent.parent for parent in made)):
                sync_folder(folder)
    except BaseException:
        for parent in made:
            with suppress(OSError):  # somebody else put something there meanwhile
                parent.rmdir()
        raise


@contextmanager
def hidden_folder(parent: Path) -> Iterator[Path]:
    """A folder to fill and to rename; whatever has its name in the end is removed. Nobody else clears it meanwhile."""
    while True:
        folder = _hidden_name(parent)
        folder.mkdir()  # with all rights, of which the system itself takes those of the umask
        with _held(folder, wait=True) as ours:
            if not ours:  # somebody who clears leftovers came between
                continue
            try:
                yield folder
            finally:
                _remove(folder)
            return


def _hidden_name(parent: Path, *, suffix: str = "") -> Path:
    return parent / f"{TEMPORARY}{secrets.token_hex(8)}{suffix}"


@contextmanager
def _hidden_file(parent: Path, *, suffix: str) -> Iterator[tuple[Path, int]]:
    while True:
        file = _hidden_name(parent, suffix=suffix)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if not (lock(descriptor, wait=True) and _stands(file, descriptor)):
                continue
            try:
                yield file, descriptor
            finally:
                file.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def clear_leftovers(folder: Path) -> None:
    """Removes what killed processes were writing in `folder`, and puts back what they had moved aside.

    Who writes holds a lock on what is hidden, and the system takes it from the dead: what can be locked here and now belongs to nobody. Who has made
    something hidden and not locked it yet finds it gone, and makes another. Where a file system has no locks, nothing is cleared.
    """
    put_back_all(folder)
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_symlink():  # nobody writes through one, so nobody of ours made it
            path.unlink(missing_ok=True)
            continue
        with suppress(OSError), _held(path, wait=False) as ours:
            if ours:
                _remove(path)


def put_back_all(folder: Path) -> None:
    """For whoever looks which folders there are."""
    until = time.monotonic() + PUT_BACK_SECONDS
    for path in folder.glob(f"{ASIDE}*"):
        put_back(folder / path.name.removeprefix(ASIDE), until=until)


def put_back(path: Path, *, until: float | None = None) -> None:
    """For whoever reads or writes a folder that may be replaced: where a killed process had moved it aside, it has its name again.

    Only who holds the lock of a folder moves it aside or away from there. So who waits for that lock sees the work of the living finished, and what
    stands there still was left by the dead. Who holds it longer than a rename takes is not waited for: `until` when, on the monotonic clock.
    """
    aside = _aside(path)
    if not os.path.lexists(aside):
        return
    until = time.monotonic() + PUT_BACK_SECONDS if until is None else until
    with suppress(OSError), _held(aside, wait=True, until=until) as ours:
        if not ours:
            return
        if os.path.lexists(path):
            remove_folder(aside)
        else:
            os.replace(aside, path)
            sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """However the process ends, a folder has its name and is whole, or has not. Of a link only the link goes."""
    hidden = _hidden_name(path.parent)
    os.replace(path, hidden)
    _remove(hidden)


def _remove(path: Path) -> None:
    """What took its name before must be on the disk first. If that fails, it stays until somebody clears it: by hand, where folders in it are nested
    deeper than any of ours."""
    with suppress(OSError, RecursionError):
        if path.is_dir() and not path.is_symlink():
            sync_folder(path.parent)
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


# --- putting a folder where another stands


def _place(temporary: Path, path: Path) -> None:
    """`temporary` becomes `path`; what stood there then stands at `temporary`, or nowhere if it was empty."""
    while True:
        try:
            os.replace(temporary, path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if exchange(temporary, path) or _step_aside(temporary, path):
            return


def exchange(one: Path, other: Path) -> bool:
    """Two names change places in one call: whether they did. Many systems and file systems cannot."""
    call = _exchanging_call()
    return call is not None and call(os.fsencode(one), os.fsencode(other)) == 0


@cache
def _exchanging_call() -> Any:
    with suppress(ImportError, OSError, AttributeError, TypeError):  # a Python or a C library that has no such call
        import ctypes

        library = ctypes.CDLL(None)
        if sys.platform == "darwin":
            return lambda one, other: library.renamex_np(one, other, EXCHANGE)
        rename = library.renameat2
        return lambda one, other: rename(AT_FDCWD, one, AT_FDCWD, other, EXCHANGE)
    return None


def _step_aside(temporary: Path, path: Path) -> bool:
    """The same in three renames; False if somebody else came between, and it must be tried again."""
    put_back(path)
    aside = _aside(path)
    with _held(path, wait=True) as ours:
        if not ours:
            return False
        try:
            os.replace(path, aside)
            os.replace(temporary, path)
        except BaseException as error:
            if not os.path.lexists(path):
                os.replace(aside, path)
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        sync_folder(path.parent)
        os.replace(aside, temporary)
        return True


def _aside(path: Path) -> Path:
    return path.parent / f"{ASIDE}{path.name}"


# --- locks


@contextmanager
def _held(path: Path, *, wait: bool, until: float | None = None) -> Iterator[bool]:
    """Whether `path` is still there and is ours while the block lasts. The lock is on the thing, not on its name: it goes with it when it is renamed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | NO_LINK)
    except FileNotFoundError:
        descriptor = None
    except PermissionError:
        # Windows opens no folders: there a writer goes on without a lock, and who only clears does not dare.
        if sys.platform == "win32":
            yield wait
            return
        raise
    if descriptor is None:
        yield False
        return
    try:
        yield lock(descriptor, wait=wait, until=until) and _stands(path, descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int, *, wait: bool, until: float | None = None) -> bool:
    """`until` when it is waited for, if not for ever."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return wait
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait and until is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not wait or until is None or time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
        except OSError:  # no locks here: a writer goes on without, and who only clears does not dare
            return wait


def _stands(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def cache_folder() -> Path:
    """What was brought over a network is kept here, so that nothing is brought twice."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transformer_xl"


# --- plain files


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A write that fails on an open file says why, but not where; and nobody knows a temporary file by its name."""
    try:
        yield
    except OSError as error:
        if error.filename is None or any(hidden in str(error.filename) for hidden in (TEMPORARY, ASIDE)):
            error.filename, error.filename2 = str(path), None
        raise


def open_plain(path: Path, mode: str) -> IO[str]:
    """For text that is written in place: a link would lead anywhere, and a pipe to nobody."""

    def opener(name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | NO_LINK, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise _not_plain(name) from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _not_plain(name)
        return descriptor

    return open(path, mode, encoding="utf-8", opener=opener)


def _not_plain(name: str) -> OSError:
    what = "this is a link, a folder or a special file where a plain file belongs; remove it, or give another name"
    return OSError(errno.ELOOP, what, name)


def strange_file(paths: Iterable[Path], *, links: bool = False) -> Path | None:
    """The first that is neither a plain file nor a folder: a link leads anywhere, and who opens a pipe may wait for ever. `links` to plain files may be
    good for who only reads."""
    for path in paths:
        with suppress(FileNotFoundError):
            mode = path.stat().st_mode if links else path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                return path
    return None


def write_text(path: Path | str, text: str) -> None:
    with atomic_file(path, "w") as file:
        file.write(readable(text))


def readable(text: str) -> str:
    """Under an ASCII locale the bytes of a name's letters reach us one by one: they are letters again, where they are UTF-8, and else escaped as JSON
    escapes them."""

    def letters(found: re.Match[str]) -> str:
        return found[0].encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")

    return re.sub("[\udc80-\udcff]+", letters, text).encode("utf-8", "backslashreplace").decode("utf-8")


def path_from_text(text: str) -> Path:
    """A path that was written into a file, whatever the locale was and is."""
    return Path(os.fsdecode(text.encode("utf-8", "surrogateescape")))


def write_json(path: Path | str, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync_tree(folder: Path) -> None:
    """Everything in a folder, what lies deepest first."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in sorted(names):
            # Windows writes out only what may be written.
            with Path(place, name).open("r+b" if sys.platform == "win32" else "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(place))


def sync_folder(path: Path) -> None:
    if sys.platform == "win32":  # where a folder cannot be opened, and its names are written out with its files
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path | str, algorithm: str = "sha256") -> str:
    """The hexadecimal checksum of a file, read in pieces."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()
