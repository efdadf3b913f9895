"""Where text comes in: a file, plain or compressed, or a member of an archive, read in blocks and verified as it is read.

What a file is, is told by its first bytes, never by its name. Every damage leaves here as a DataError naming the file.
"""

import fnmatch
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
from numpy.typing import NDArray

from transformer_xl.data.corpora import unpacking
from transformer_xl.data.corpora.recipes import KnownFile
from transformer_xl.errors import DataError

COMPRESSED_ENDINGS = (".gz", ".xz", ".bz2", ".zst")
LONGEST_NAME = 256


@dataclass(frozen=True, kw_only=True)
class Source:
    path: Path
    member: str | None = None
    """Name inside a .zip; None for a file of its own."""
    known: KnownFile | None = None
    """What it must be; None for people's own text."""
    most: int | None = None
    """What it may become, where that depends on what it is for."""
    title: str | None = None
    """What people know it by, where it lies under another name: it came out of an archive or of standard input."""
    starts: Path | None = None
    """The file of int64 positions where its documents begin, where it holds many."""

    @property
    def name(self) -> str:
        if self.title is not None:
            return self.title
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    @property
    def disk_bytes(self) -> int:
        return self.path.stat().st_size

    @cached_property
    def kind(self) -> str:
        """gz, xz, bz2, zst, zip or plain, by the first bytes. Asked often, and looked at once: a file does not change while it is read."""
        return unpacking.kind_of(self.path)

    @property
    def plain(self) -> bool:
        return self.member is None and self.kind == "plain"

    @property
    def most_bytes(self) -> int | None:
        """What it may become; None for a plain file of one's own, which is as large as it is."""
        if self.most is not None:
            return self.most
        if self.known is not None:
            return self.known.most_bytes
        return None if self.plain else unpacking.most_unpacked(self.disk_bytes)

    @property
    def refusal(self) -> DataError:
        """What is said once it is larger."""
        most = self.most_bytes or 0
        if self.known is None:
            return unpacking.too_large(self.name, most)
        return DataError(
            f"{self.name} is not the {self.known.name} we know: it has more than {most:,} bytes; bring the right file with `source=`"
        )

    def record_starts(self) -> NDArray[np.int64] | None:
        return None if self.starts is None else np.memmap(self.starts, dtype=np.int64, mode="r")

    @contextmanager
    def open(self, *, advance: unpacking.Advance | None = None) -> Iterator[unpacking.Stream]:
        """The text as bytes, decompressed. `advance` hears of the bytes read from disk, whose total is known beforehand."""
        with ExitStack() as opened:
            with unpacking.said(self.name):
                stream = self._unpacked(opened, advance)
            yield unpacking.Stream(stream, name=self.name, most=self.most_bytes, refusal=self.refusal)

    def _unpacked(self, opened: ExitStack, advance: unpacking.Advance | None) -> IO[bytes]:
        raw = opened.enter_context(unpacking.Counting(self.path, advance))
        if self.member is not None:
            archive = opened.enter_context(zipfile.ZipFile(raw))
            return opened.enter_context(unpacking.opened_member(archive, self.member, name=self.name))
        buffered = opened.enter_context(io.BufferedReader(raw, unpacking.BLOCK))
        return opened.enter_context(unpacking.decompressed(buffered, self.kind))

    def blocks(self, *, advance: unpacking.Advance | None = None) -> Iterator[bytes]:
        """The whole text in blocks. A known file is verified at its end: a wrong one raises before the last block is trusted, one that is too long
        as soon as it is."""
        md5 = hashlib.md5(usedforsecurity=False)
        size = 0
        with self.open(advance=advance) as stream:
            while block := stream.read(unpacking.BLOCK):
                if self.known is not None and self.known.md5:
                    md5.update(block)
                size += len(block)
                yield block
        if self.known is not None and self.known.md5 and (found := md5.hexdigest()) != self.known.md5:
            raise DataError(
                f"{self.name} is not the {self.known.name} we know: its md5 is {found} ({size:,} bytes) "
                f"and should be {self.known.md5} ({self.known.bytes:,} bytes); bring the right file with `source=`"
            )

    def read(self, *, advance: unpacking.Advance | None = None) -> bytes:
        return b"".join(self.blocks(advance=advance))


def is_tar(path: Path) -> bool:
    try:
        with Source(path=path).open() as stream:
            tarfile.TarInfo.frombuf(stream.read(tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
            return True
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
        return True  # it ends where its first member would begin
    except (DataError, tarfile.TarError):
        return False


def find_known(files: tuple[KnownFile, ...], *, source: Path, scratch: Path) -> dict[str, list[Source]]:
    """Name of the known file -> where it was found, in order; a pattern may find many. What is not there has an empty list.

    A lone file that is no archive is taken to be the one known file, whatever it is called: its checksum tells.
    Members of a .tar are unpacked into `scratch`, since a compressed .tar can only be read from the front.
    """
    if not source.exists():
        raise DataError(f"{source} does not exist; give `source=` a file, an archive or a folder")
    if source.is_dir():
        candidates = []
        for path in filter(Path.is_file, sorted(source.rglob("*"))):
            # Only what calls itself a .zip is opened: a folder of downloads may hold anything else.
            candidates += file_or_members(path) if path.suffix == ".zip" else [Source(path=path)]
    elif is_tar(source):
        candidates = unpack_tar(source, files=files, into=scratch)
    elif len(files) == 1 and unpacking.kind_of(source) != "zip":
        return {files[0].name: [Source(path=source, known=files[0])]}
    else:
        candidates = file_or_members(source)
    return {file.name: _found(file, candidates) for file in files}


def _found(known: KnownFile, candidates: list[Source]) -> list[Source]:
    found = [source for source in candidates if matches(source, known.name)]
    if len(found) > 1 and "*" not in known.name:
        raise DataError(f"{known.name} is there twice: {found[0].name} and {found[1].name}; give `source=` one of them")
    return [replace(source, known=known) for source in found]


def matches(source: Source, pattern: str) -> bool:
    name = PurePosixPath(source.member).name if source.member else source.path.name
    return any(fnmatch.fnmatchcase(name, pattern + ending) for ending in ("", *COMPRESSED_ENDINGS))


def file_or_members(path: Path) -> list[Source]:
    """One file is one source, unless it is a .zip: that is as many as it has members."""
    if unpacking.kind_of(path) != "zip":
        return [Source(path=path)]
    with unpacking.said(str(path)), zipfile.ZipFile(path) as archive:
        entries = unpacking.listed_zip(archive, name=str(path), disk_bytes=path.stat().st_size)
    return [Source(path=path, member=name) for name in sorted(entry.filename for entry in entries)]


def unpack_tar(path: Path, *, files: tuple[KnownFile, ...], into: Path) -> list[Source]:
    """Copies the wanted members out under their bare names, so that no member's path can reach anywhere else."""
    from transformer_xl.console import progress

    found: dict[str, Source] = {}
    with (
        progress(f"unpacking {path.name}", total=path.stat().st_size, unit="bytes") as advance,
        Source(path=path).open(advance=advance) as packed,
    ):
        for name, stream in _wanted_members(packed, name=str(path), files=files):
            if name in found or len(found) == sum(file.most_files for file in files):
                raise DataError(
                    f"{path} holds {name} twice, or more files of such names than were published; give `source=` the right one"
                )
            with (into / name).open("wb") as target:
                while block := stream.read(unpacking.BLOCK):
                    target.write(block)
            found[name] = Source(path=into / name)
    return [found[name] for name in sorted(found)]


def _wanted_members(
    packed: unpacking.Stream, *, name: str, files: tuple[KnownFile, ...]
) -> Iterator[tuple[str, unpacking.Stream]]:
    """The bare name of each, and its content, which must be read before the next is asked for."""

    def known(member: tarfile.TarInfo) -> KnownFile | None:
        bare = PurePosixPath(member.name).name
        return next((file for file in files if fnmatch.fnmatchcase(bare, file.name)), None)

    for member, content in tar_files(packed, name=name, wanted=lambda member: known(member) is not None):
        bare, file = PurePosixPath(member.name).name, known(member)
        if file is not None and bare.isprintable() and len(bare) < LONGEST_NAME:
            inside = Source(path=Path(name), member=bare, known=file)
            yield bare, unpacking.Stream(content, name=inside.name, most=file.most_bytes, refusal=inside.refusal)


def tar_files(
    packed: unpacking.Stream, *, name: str, wanted: Callable[[tarfile.TarInfo], bool]
) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """Each wanted file of an archive, and its content, which must be read before the next is asked for. Neither links nor files with holes."""
    with ExitStack() as opened:
        with unpacking.said(name):
            archive = opened.enter_context(tarfile.open(fileobj=packed, mode="r|", tarinfo=unpacking.TarMember))  # type: ignore[call-overload]
        while True:
            with unpacking.said(name):
                member = archive.next()
                archive.members = []  # it would keep every one that it has passed
                if member is None:
                    return
                plain = member.isreg() and not member.issparse()
                content = archive.extractfile(member) if wanted(member) and plain else None
            if content is not None:
                yield member, content
