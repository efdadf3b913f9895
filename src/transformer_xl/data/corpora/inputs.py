"""Which texts there are in what a person gives: files, folders, archives, records, standard input. Knows no splits and no tokens.

    paths -> files, by name (folders walked, archives unpacked) -> those that are text, each once -> sources; of records, their text

What an archive calls its files is never the name of a file here: they are unpacked under numbers. What is left out, is told.
"""

import os
import re
import shutil
import stat
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, Literal

from pathspec import GitIgnoreSpec

from transformer_xl.console import progress
from transformer_xl.data.corpora import records, unpacking
from transformer_xl.data.corpora.sources import Source, is_tar, tar_files
from transformer_xl.errors import DataError
from transformer_xl.files import digest

STANDARD_INPUT = "-"
GITIGNORE = ".gitignore"
LARGEST_GITIGNORE = 1 << 20
HEAD_BYTES = 1 << 16
"""The beginning of a file, which tells whether it is text."""
MOST_CONTROL_SHARE = 0.05
"""Of the bytes of a text. A tenth of the bytes of what is compressed or compiled are control characters; of texts, in any code, none."""
CONTROL_CHARACTERS = bytes(set(range(32)) - set(b"\b\t\n\v\f\r\x1b"))
TAR_ENDINGS = (".tgz", ".tbz2", ".txz", ".tzst")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What to take of what is given."""

    field: tuple[str, ...] = ()
    """Of records, what holds the text: `text`, nested `user.name`, several one after the other. Found out where it is plain."""
    include: tuple[str, ...] = ()
    """Of folders and archives, only files of such names: patterns as .gitignore has them."""
    exclude: tuple[str, ...] = ()
    """Neither files nor folders of such names."""
    gitignore: bool = False
    """Leave out what the folders' .gitignore files leave out."""
    binary: Literal["skip", "keep"] = "skip"

    def __post_init__(self) -> None:
        for name, patterns in {"include": self.include, "exclude": self.exclude}.items():
            for pattern in patterns:
                if not pattern.strip() or pattern.startswith(("#", "!")):
                    raise DataError(f"`{name}=` {pattern!r} is no pattern; write one such as *.py or node_modules")
        for one in self.field:
            if not all(one.split(".")) or self.field.count(one) > 1:
                raise DataError(f"`field=` {one!r} must be a name, such as text or user.name, once each")
        if self.binary not in ("skip", "keep"):
            raise DataError(f"`binary={self.binary}` must be skip or keep")

    @cached_property
    def _patterns(self) -> tuple[GitIgnoreSpec, GitIgnoreSpec]:
        return GitIgnoreSpec.from_lines(self.include), GitIgnoreSpec.from_lines(self.exclude)

    def takes(self, name: PurePosixPath, *, folder: bool = False) -> bool:
        """Whether a file of this name is wanted, or a folder is worth looking into. Hidden ones are not."""
        include, exclude = self._patterns
        text = f"{name}/" if folder else str(name)
        if name.name.startswith(".") or exclude.match_file(text):
            return False
        return folder or not self.include or include.match_file(text)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    sources: list[Source]
    skipped: list[tuple[str, str]]
    """(why, what)"""
    records: int = 0
    field: tuple[str, ...] = ()

    @property
    def counts(self) -> Counter[str]:
        return Counter(why for why, _ in self.skipped)


@dataclass(frozen=True, kw_only=True)
class _File:
    path: Path
    title: str
    """What people know it by."""
    named: bool = False
    """By the person, and not found in a folder or an archive."""


_Members = Callable[[_File, unpacking.Advance], Iterator[tuple[PurePosixPath, unpacking.Stream]]]
"""How the members of an archive are read: each one's name and content, one after the other."""


@dataclass(kw_only=True)
class _Gathering:
    """One look at all paths."""

    inputs: Inputs
    scratch: Path
    standard_input: BinaryIO | None
    skipped: list[tuple[str, str]] = field(default_factory=list)
    numbered: int = 0

    def scratch_file(self) -> Path:
        self.numbered += 1
        return self.scratch / str(self.numbered)

    # --- files by name

    def files_of(self, path: Path | str) -> Iterator[_File]:
        if path == STANDARD_INPUT:
            # Text is read more than once (to count, to encode), which a stream cannot be.
            kept = self.scratch / "standard input"
            with kept.open("wb") as copy:
                shutil.copyfileobj(self.standard_input or sys.stdin.buffer, copy)
            yield from self.file_or_members(_File(path=kept, title="standard input", named=True))
            return
        path = Path(path)
        if not path.exists():
            raise DataError(f"{path} does not exist")
        if not path.is_dir():
            yield from self.file_or_members(_File(path=path, title=str(path), named=True))
            return
        for file in self.walk(path):
            yield from self.file_or_members(_File(path=file, title=str(file)))

    def walk(self, folder: Path) -> list[Path]:
        """The files of a folder that are wanted, in an order no file system decides. Links to folders are not followed."""
        found, ignored = [], _Ignored(folder) if self.inputs.gitignore else None

        def taken(here: Path, name: str, *, is_folder: bool) -> bool:
            path = here / name
            relative = PurePosixPath(path.relative_to(folder).as_posix())
            if not self.inputs.takes(relative, folder=is_folder):
                return False
            return ignored is None or not ignored.leaves_out(path, folder=is_folder)

        for place, folders, files in os.walk(folder):
            here = Path(place)
            if here != folder and is_ours(folders, files):
                self.skipped.append(("ours", f"{here} is a data store or a run"))
                folders[:] = []
                continue
            folders[:] = [name for name in folders if taken(here, name, is_folder=True)]
            found += [here / name for name in files if taken(here, name, is_folder=False) and (here / name).is_file()]
        return sorted(found)

    def file_or_members(self, file: _File) -> Iterator[_File]:
        if file.path.stat().st_size == 0:
            yield file
            return
        name = file.path.name.lower()
        # Many other files are a .zip inside, such as documents and programs; and whether a compressed file is a .tar shows after some work.
        if (file.named or name.endswith(".zip")) and unpacking.kind_of(file.path) == "zip":
            yield from self.unpacked(file, self.zip_members)
        elif (".tar" in name or name.endswith(TAR_ENDINGS)) and is_tar(file.path):
            yield from self.unpacked(file, self.tar_members)
        else:
            yield file

    def unpacked(self, archive: _File, members: _Members) -> list[_File]:
        """The members that are wanted, sorted as the files of a folder are."""
        found: list[tuple[tuple[str, ...], _File]] = []
        with progress(f"unpacking {archive.path.name}", total=archive.path.stat().st_size, unit="bytes") as advance:
            for name, content in members(archive, advance):
                target, title = self.scratch_file(), f"{archive.title}:{name}"
                with target.open("wb") as copy:
                    while block := content.read(unpacking.BLOCK):
                        copy.write(block)
                found.append((name.parts, _File(path=target, title=title)))
        return [file for _, file in sorted(found, key=lambda one: one[0])]

    def member_name(self, archive: _File, name: str, *, link: bool) -> PurePosixPath | None:
        """As a folder's file would be called; None where it is not wanted."""
        inside = PurePosixPath(*(part for part in PurePosixPath(name).parts if part not in ("/", "//", "..")))
        wanted = all(self.inputs.takes(parent, folder=True) for parent in list(inside.parents)[:-1])
        if not wanted or not self.inputs.takes(inside):
            return None
        if link:
            self.skipped.append(("link", f"{archive.title}:{inside}"))
        return None if link else inside

    def zip_members(
        self, archive: _File, advance: unpacking.Advance
    ) -> Iterator[tuple[PurePosixPath, unpacking.Stream]]:
        with ExitStack() as opened:
            with unpacking.said(archive.title):
                file = opened.enter_context(unpacking.Counting(archive.path, advance))
                packed = opened.enter_context(zipfile.ZipFile(file))
                size = archive.path.stat().st_size
                entries = unpacking.listed_zip(packed, name=archive.title, disk_bytes=size)
            for entry in entries:
                link = stat.S_ISLNK(entry.external_attr >> 16)
                if (name := self.member_name(archive, entry.filename, link=link)) is not None:
                    title = f"{archive.title}:{name}"
                    with unpacking.said(title):
                        content = unpacking.opened_member(packed, entry.filename, name=title)
                    with content:
                        yield name, _bounded(content, title, entry.file_size)

    def tar_members(
        self, archive: _File, advance: unpacking.Advance
    ) -> Iterator[tuple[PurePosixPath, unpacking.Stream]]:
        def wanted(member: tarfile.TarInfo) -> bool:
            special = not member.isreg() or member.issparse()
            return not member.isdir() and self.member_name(archive, member.name, link=special) is not None

        source = Source(path=archive.path, title=archive.title)
        with source.open(advance=advance) as packed:
            for member, content in tar_files(packed, name=archive.title, wanted=wanted):
                name = self.member_name(archive, member.name, link=False)
                assert name is not None
                yield name, _bounded(content, f"{archive.title}:{name}", member.size)

    # --- those that are text

    def texts(self, files: Iterable[_File]) -> list[_File]:
        """What is neither empty nor binary nor there already."""
        waiting = [file for file in files if self.has_something(file) and self.is_text(file)]
        sizes = Counter(file.path.stat().st_size for file in waiting)
        seen, found = dict[str, str](), []
        for file in waiting:
            if sizes[file.path.stat().st_size] > 1:
                with unpacking.said(file.title):
                    same = seen.setdefault(digest(file.path), file.title)
                if same != file.title:
                    self.skipped.append(("duplicate", f"{file.title} is {same}"))
                    continue
            found.append(file)
        return found

    def has_something(self, file: _File) -> bool:
        if file.path.stat().st_size:
            return True
        if file.named:
            raise DataError(f"{file.title} is empty; give it some text")
        self.skipped.append(("empty", file.title))
        return False

    def is_text(self, file: _File) -> bool:
        if file.title == "standard input" or records.format_of(file.title):
            return True
        source = Source(path=file.path, title=file.title)
        with source.open() as stream:
            head = stream.read(HEAD_BYTES)
        if not head:
            self.skipped.append(("empty", file.title))
        elif self.inputs.binary == "skip" and is_binary(head):
            self.skipped.append(("binary", file.title))
        else:
            return True
        return False

    def source(self, file: _File, advance: unpacking.Advance) -> Source | records.Spooled:
        source = Source(path=file.path, title=file.title)
        form = records.format_of(file.title)
        if file.title == "standard input" and self.inputs.field:
            form = "jsonl"  # it has no name to tell; what streams in records is this
        if form is None:
            return source
        spooled = records.spool(source, form=form, field=self.inputs.field, into=self.scratch_file(), advance=advance)
        if file.path.parent == self.scratch:
            file.path.unlink()  # its text is all that is wanted
        for many, what in (
            (spooled.without_text, f"without text in {' or '.join(spooled.field)}"),
            (spooled.mended, "have half characters, written as U+FFFD"),
        ):
            if many:
                self.skipped.append(("record", f"{file.title}: {many:,} {what}"))
        return spooled


def gather(
    paths: Sequence[Path | str],
    *,
    scratch: Path,
    inputs: Inputs,
    standard_input: BinaryIO | None = None,
) -> Gathered:
    """Every text in `paths`, in order. The path `-` is standard input."""
    gathering = _Gathering(inputs=inputs, scratch=scratch, standard_input=standard_input)
    files = gathering.texts(file for path in paths for file in gathering.files_of(path))
    of_records = [file for file in files if records.format_of(file.title)]
    if inputs.field and files and not of_records and all(file.title != "standard input" for file in files):
        raise DataError(
            f"`field={inputs.field[0]}` is for .jsonl, .csv, .tsv and .parquet, and {files[0].title} is none"
        )
    with progress(
        "reading records", total=sum(file.path.stat().st_size for file in of_records), unit="bytes"
    ) as advance:
        made = [gathering.source(file, advance) for file in files]
    spooled = [one for one in made if isinstance(one, records.Spooled)]
    gathered = Gathered(
        sources=[one.source if isinstance(one, records.Spooled) else one for one in made],
        skipped=gathering.skipped,
        records=sum(one.records for one in spooled),
        field=tuple(dict.fromkeys(name for one in spooled for name in one.field)),
    )
    if not gathered.sources:
        raise DataError(f"{' and '.join(map(str, paths))} holds no text: {_why_none(gathered)}")
    return gathered


def _why_none(gathered: Gathered) -> str:
    if not gathered.skipped:
        return "there is no file that is not hidden or left out"
    told = ", ".join(f"{count:,} {why}" for why, count in sorted(gathered.counts.items()))
    binary = "; `binary=keep` takes those that are binary" if gathered.counts["binary"] else ""
    return f"all that is there was skipped ({told}){binary}"


def is_ours(folders: list[str], files: list[str]) -> bool:
    """Whether a folder that holds these was made by us: what was learned of a text, or made of it, is not text of its own."""
    store = "manifest.json" in files and any(name.endswith(".tokens.bin") for name in files)
    return store or ("config.json" in files and "checkpoints" in folders)


def is_binary(head: bytes) -> bool:
    control = len(head) - len(head.translate(None, CONTROL_CHARACTERS))
    return b"\0" in head or control > MOST_CONTROL_SHARE * len(head)


def _bounded(content: IO[bytes], name: str, size: int) -> unpacking.Stream:
    return unpacking.Stream(content, name=name, most=size, refusal=unpacking.too_large(name, size))


class _Ignored:
    """What the .gitignore files of a folder, of those in it and of its repository leave out."""

    def __init__(self, folder: Path) -> None:
        self._specs: dict[tuple[Path, bool], GitIgnoreSpec] = {}
        top = folder.resolve()
        above = next((place for place in (top, *top.parents) if (place / ".git").exists()), top)
        self._folder, self._top, self._above = folder, top, above

    def leaves_out(self, path: Path, *, folder: bool) -> bool:
        """The deepest file that speaks of it decides, as git has it."""
        path = self._top / path.relative_to(self._folder)
        for place in path.parents:
            told = self._spec(place, folder).check_file(path.relative_to(place).as_posix() + "/" * folder).include
            if told is not None:
                return told
            if place == self._above:
                break
        return False

    def _spec(self, place: Path, folder: bool) -> GitIgnoreSpec:
        if (place, folder) not in self._specs:
            lines, file = list[str](), place / GITIGNORE
            if file.is_file():
                with unpacking.said(str(file)), file.open("rb") as text:
                    lines = text.read(LARGEST_GITIGNORE).decode(errors="surrogateescape").splitlines()
            # `x/**` is all that lies in x and not x itself, in which a file of its own may speak again.
            lines = [re.sub(r"/\*\*\s*$", "/*", line) for line in lines] if folder else lines
            self._specs[place, folder] = GitIgnoreSpec.from_lines(lines)
        return self._specs[place, folder]
