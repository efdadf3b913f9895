"""Folders in object storage, s3://bucket/data/enwik8, through fsspec: read whole, checked, and kept as a local copy. Knows no tokens.

    s3://bucket/data/enwik8/manifest.json, tokenizer.json        read at each opening: with the checksums they hold, they name the copy
                            train.tokens.bin, ...                fetched once a machine, each compared with its checksum
    ~/.cache/transformer_xl/stores/7c1f.../                      appears whole or not at all, and is mapped into memory like any store

A copy, because training reads every lane at another place of the text, a few hundred bytes each, at every step: of a mapped file that costs
nothing, of an object a request each.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from transformer_xl.console import progress, say
from transformer_xl.errors import DataError, MissingPackage
from transformer_xl.files import atomic_folder, cache_folder, lock, remove_folder

if TYPE_CHECKING:
    from transformer_xl.data.store import FileRecord

BLOCK = 4 << 20
FREE_BYTES = 64 << 20
"""Left free beside a copy."""


def is_address(place: object) -> bool:
    """`s3://...`, and what a Path makes of it; no drive of Windows'."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:(//|/(?=[^/]))", str(place)) is not None


class RemoteFolder:
    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        if "://" not in self.address:
            raise DataError(
                f"{self.address} is an address that was taken for a path; give it as text, with its two slashes"
            )
        try:
            import fsspec
        except ModuleNotFoundError:
            raise MissingPackage(
                f"{self.address} is read through fsspec; install it with: pip install 'transformer-xl[remote]'"
            ) from None
        with self._speaking(self.address):
            self.files, self.root = fsspec.url_to_fs(self.address)

    def read(self, name: str, *, at_most: int) -> bytes | None:
        """A small file; None where there is none."""
        with self._speaking(f"{self.address}/{name}"):
            try:
                with self._open(name) as file:
                    data = bytes(file.read(at_most + 1))
            except (FileNotFoundError, IsADirectoryError):
                return None
        if len(data) > at_most:
            raise DataError(f"{self.address}/{name} has more than {at_most:,} bytes; there is no store at this address")
        return data

    def fetch(self, record: "FileRecord", target: Path, *, advance: Callable[[int], None]) -> None:
        """Not a byte more than the record says, and none other."""
        place, checksum, size = f"{self.address}/{record.name}", hashlib.sha256(), 0
        with target.open("wb") as copy, closing(self._blocks(record.name)) as blocks:
            for data in blocks:
                size += len(data)
                if size > record.bytes:
                    break
                checksum.update(data)
                copy.write(data)
                advance(len(data))
        if size != record.bytes:
            told = f"{'more' if size > record.bytes else 'only ' + format(size, ',')} bytes where the manifest says {record.bytes:,}"
            raise DataError(f"{place} has {told}; copy the store there again")
        if checksum.hexdigest() != record.sha256:
            told = f"sha256 {checksum.hexdigest()} where the manifest says {record.sha256}"
            raise DataError(f"{place} has {told}; copy the store there again")

    def _blocks(self, name: str) -> Generator[bytes, None, None]:
        with self._speaking(f"{self.address}/{name}"), self._open(name) as file:
            while data := file.read(BLOCK):
                yield data

    def _open(self, name: str) -> IO[bytes]:
        file: IO[bytes] = self.files.open(f"{self.root}/{name}", mode="rb")
        return file

    @contextmanager
    def _speaking(self, place: str) -> Iterator[None]:
        """Each file system raises what its own library raises."""
        try:
            yield
        except FileNotFoundError as error:
            raise DataError(f"{place} is missing; copy the store there again") from error
        except ImportError as error:
            raise MissingPackage(
                f"{place} needs a package of its own ({_first_line(error)}); for s3:// install it with: pip install 'transformer-xl[remote]'"
            ) from error
        except Exception as error:
            raise DataError(
                f"{place} cannot be read ({type(error).__name__}: {_first_line(error)}); check the address, and who may read there"
            ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no reason given"])[0][:200]


def local_copy(
    remote: RemoteFolder,
    *,
    small: Mapping[str, bytes],
    large: Sequence["FileRecord"],
    check: Callable[[Path], object],
) -> Path:
    """The folder of the copy, named by all that it holds. One process of a machine fetches it, and the others wait. One that `check` refuses is fetched anew."""
    name = hashlib.sha256()
    for file, data in sorted(small.items()):
        name.update(f"{file} {len(data)}\n".encode() + data)
    cache = cache_folder() / "stores"
    folder = cache / name.hexdigest()[:32]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache / f".{folder.name}.lock"):
            if folder.exists():
                try:
                    check(folder)
                    return folder
                except DataError as error:
                    say(f"the copy of {remote.address} is damaged ({error}); fetching it anew")
                    remove_folder(folder)
            total = sum(record.bytes for record in large)
            if total + FREE_BYTES > (free := shutil.disk_usage(cache).free):
                raise DataError(
                    f"{remote.address} takes {total:,} bytes, and {cache} has room for {free:,}; free some, or set another XDG_CACHE_HOME"
                )
            with atomic_folder(folder) as copy, progress("fetching", total=total, unit="bytes") as advance:
                for file, data in small.items():
                    (copy / file).write_bytes(data)
                for record in large:
                    remote.fetch(record, copy / record.name, advance=advance)
    except OSError as error:
        raise DataError(f"{cache} cannot be written: {error.strerror or error}; set another XDG_CACHE_HOME") from error
    return folder


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)
