"""Where text comes in: a file, plain or compressed, or a member of an archive, read in pieces and verified as it is read.

What a file is, is told by its first bytes, never by its name. Every damage leaves here as a DataError naming the file.
"""

import bz2
import fnmatch
import gzip
import hashlib
import io
import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from transformer_xl.data.recipes import KnownFile
from transformer_xl.errors import DataError

PIECE = 1 << 20
COMPRESSED_ENDINGS = (".gz", ".xz", ".bz2")
MAGIC = {b"\x1f\x8b": "gz", b"\xfd7zXZ\x00": "xz", b"BZh": "bz2", b"PK\x03\x04": "zip", b"PK\x05\x06": "zip"}
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)

Advance = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class Source:
    path: Path
    member: str | None = None
    """Name inside a .zip; None for a file of its own."""
    known: KnownFile | None = None
    """What it must be; None for people's own text."""

    @property
    def name(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    @property
    def disk_bytes(self) -> int:
        return self.path.stat().st_size

    @contextmanager
    def open(self, *, advance: Advance | None = None) -> Iterator[IO[bytes]]:
        """The text as bytes, decompressed. `advance` hears of the bytes read from disk, whose total is known beforehand."""
        try:
            with _Counting(self.path, advance) as raw:
                if self.member is not None:
                    with zipfile.ZipFile(raw) as archive, archive.open(self.member) as stream:
                        yield stream
                else:
                    with io.BufferedReader(raw, PIECE) as buffered, _decompress(buffered, kind_of(self.path)) as stream:
                        yield stream
        except DAMAGE as error:
            raise damaged(self.name, error) from error
        except (IsADirectoryError, FileNotFoundError, PermissionError) as error:
            raise DataError(f"{self.name} cannot be read: {error.strerror}") from error

    def pieces(self, *, advance: Advance | None = None) -> Iterator[bytes]:
        """The whole text in pieces. A known file is verified at its end: a wrong one raises before the last piece is trusted."""
        md5 = hashlib.md5(usedforsecurity=False)
        size = 0
        with self.open(advance=advance) as stream:
            while piece := stream.read(PIECE):
                if self.known is not None and self.known.md5:
                    md5.update(piece)
                size += len(piece)
                yield piece
        if self.known is not None:
            self._verify(size, md5.hexdigest())

    def read(self, *, advance: Advance | None = None) -> bytes:
        return b"".join(self.pieces(advance=advance))

    def _verify(self, size: int, md5: str) -> None:
        known = self.known
        assert known is not None
        if known.md5 and md5 != known.md5:
            raise DataError(
                f"{self.name} is not the {known.name} we know: its md5 is {md5} ({size:,} bytes) "
                f"and should be {known.md5} ({known.bytes:,} bytes); bring the right file with --source"
            )


class _Counting(io.FileIO):
    """A file that tells how far it has been read."""

    def __init__(self, path: Path, advance: Advance | None) -> None:
        super().__init__(path, "rb")
        self._advance = advance

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        if self._advance is not None and count:
            self._advance(count)
        return count

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(-1 if size is None else size)
        if self._advance is not None:
            self._advance(len(data))
        return data


def _decompress(buffered: IO[bytes], kind: str) -> IO[bytes]:
    if kind == "gz":
        return gzip.GzipFile(fileobj=buffered)  # type: ignore[return-value]
    if kind == "xz":
        return lzma.LZMAFile(buffered)
    if kind == "bz2":
        return bz2.BZ2File(buffered)
    return buffered


def kind_of(path: Path) -> str:
    """gz, xz, bz2, zip or plain, by the first bytes."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "plain")


def is_tar(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (*DAMAGE, OSError):
        return False


def damaged(name: str, error: Exception) -> DataError:
    return DataError(f"{name} is damaged or cut short ({error}); fetch it again")


def find_known(files: tuple[KnownFile, ...], *, source: Path, scratch: Path) -> dict[str, list[Source]]:
    """Name of the known file -> where it was found, in order; a pattern may find many. What is not there has an empty list.

    A lone file that is no archive is taken to be the one known file, whatever it is called: its checksum tells.
    Members of a .tar are unpacked into `scratch`, since a compressed .tar can only be read from the front.
    """
    if not source.exists():
        raise DataError(f"{source} does not exist; give --source a file, an archive or a folder")
    if source.is_dir():
        candidates = [found for path in sorted(source.rglob("*")) if path.is_file() for found in _inside_folder(path)]
    elif is_tar(source):
        candidates = unpack_tar(source, patterns=[file.name for file in files], into=scratch)
    elif len(files) == 1 and kind_of(source) != "zip":
        return {files[0].name: [Source(path=source, known=files[0])]}
    else:
        candidates = file_or_members(source)
    return {file.name: _found(file, candidates) for file in files}


def _inside_folder(path: Path) -> list[Source]:
    # Only what calls itself a .zip is opened: a folder of downloads may hold anything else.
    return file_or_members(path) if path.suffix == ".zip" else [Source(path=path)]


def _found(known: KnownFile, candidates: list[Source]) -> list[Source]:
    found = [source for source in candidates if matches(source, known.name)]
    if len(found) > 1 and "*" not in known.name:
        raise DataError(
            f"{known.name} is there twice: {found[0].name} and {found[1].name}; give --source only one of them"
        )
    return [replace(source, known=known) for source in found]


def matches(source: Source, pattern: str) -> bool:
    name = PurePosixPath(source.member).name if source.member else source.path.name
    return any(fnmatch.fnmatchcase(name, pattern + ending) for ending in ("", *COMPRESSED_ENDINGS))


def file_or_members(path: Path) -> list[Source]:
    """One file is one source, unless it is a .zip: that is as many as it has members."""
    return zip_members(path) if kind_of(path) == "zip" else [Source(path=path)]


def zip_members(path: Path) -> list[Source]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(info.filename for info in archive.infolist() if not info.is_dir())
    except DAMAGE as error:
        raise damaged(str(path), error) from error
    return [Source(path=path, member=name) for name in names]


def unpack_tar(path: Path, *, patterns: list[str], into: Path) -> list[Source]:
    """Copies the wanted members out under their bare names, so that no member's path can reach anywhere else."""
    from transformer_xl.progress import progress

    found = []
    try:
        with (
            progress(f"unpacking {path.name}", total=path.stat().st_size, unit="bytes") as advance,
            _Counting(path, advance) as raw,
            io.BufferedReader(raw, PIECE) as buffered,
            tarfile.open(fileobj=buffered, mode="r|*") as archive,
        ):
            for member in archive:
                name = PurePosixPath(member.name).name
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is None or not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                    continue
                with (into / name).open("wb") as target:
                    shutil.copyfileobj(stream, target, PIECE)
                found.append(Source(path=into / name))
    except DAMAGE as error:
        raise damaged(str(path), error) from error
    return sorted(found, key=lambda source: source.path.name)
