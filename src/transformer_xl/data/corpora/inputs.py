"""Which texts there are in what a person gives: files, folders, archives, records, standard input. Knows no splits and no tokens.

    paths -> files, by name (folders walked, archives unpacked) -> those that are text, each once -> sources; of records, their text

What an archive calls its files is never the name of a file here: they are unpacked under numbers. What is left out, is told.
"""

import codecs
import errno
import os
import shutil
import stat
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, NoReturn

from transformer_xl.console import progress
from transformer_xl.data.corpora import records, unpacking
from transformer_xl.data.corpora.selection import Ignored, Inputs
from transformer_xl.data.corpora.sources import Source, is_tar, tar_files
from transformer_xl.errors import DataError, shown
from transformer_xl.files import digest

STANDARD_INPUT = "-"
HEAD_BYTES = 1 << 16
"""The beginning of a file, which tells whether it is text."""
MOST_CONTROL_SHARE = 0.05
"""Of the bytes of a text. A tenth of the bytes of what is compressed or compiled are control characters; of texts, in any code, none."""
CONTROL_CHARACTERS = bytes(set(range(32)) - set(b"\b\t\n\v\f\r\x1b"))
MARKS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16"}
MARKS |= {codecs.BOM_UTF16_BE: "UTF-16"}
"""What a text in another code than UTF-8 begins with; the mark of UTF-16 is the beginning of one of UTF-32."""
SPECIAL = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
TAR_ENDINGS = (".tgz", ".tbz2", ".txz", ".tzst")


@dataclass(frozen=True, kw_only=True)
class Gathered:
    sources: list[Source]
    skipped: list[tuple[str, str]]
    """(why, what)"""
    told: tuple[str, ...] = ()
    """What else is to be known of what was taken."""
    without_text: int = 0
    """Records that have none; `skipped` has one line for each file of them."""
    records: int = 0
    field: tuple[str, ...] = ()

    @property
    def counts(self) -> Counter[str]:
        counts = Counter(why for why, _ in self.skipped)
        if self.without_text:
            counts["record"] = self.without_text
        return counts


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
    unwanted: set[tuple[str, bool]] = field(default_factory=set)
    """(name, whether it is a folder) of all that patterns leave out."""
    members: int = 0
    """Of archives, wanted or not."""
    numbered: int = 0
    without_text: int = 0
    """Records."""

    def scratch_file(self) -> Path:
        self.numbered += 1
        return self.scratch / str(self.numbered)

    # --- files by name

    def files_of(self, path: Path | str) -> Iterator[_File]:
        if path == STANDARD_INPUT:
            # Text is read more than once (to count, to encode), which a stream cannot be.
            kept = self.scratch / "standard input"
            if kept.exists():
                raise DataError("standard input is there once, and - is given twice; give it once")
            with kept.open("wb") as copy:
                shutil.copyfileobj(self.standard_input or sys.stdin.buffer, copy)
            yield from self.file_or_members(_File(path=kept, title="standard input", named=True))
            return
        path = Path(path)
        if not path.exists():
            raise DataError(f"{path} does not exist")
        if what := SPECIAL.get(stat.S_IFMT(path.stat().st_mode)):
            raise DataError(
                f"{path} is {what} and no plain file; give what comes out of it to txl prepare - or write it to a file first"
            )
        file = _File(path=path, title=str(path), named=True)
        if self.leaves_out_named(file):
            self.skipped.append(("unwanted", str(path)))
        elif not path.is_dir():
            yield from self.file_or_members(file)
        else:
            for found in self.walk(path):
                yield from self.file_or_members(_File(path=found, title=str(found)))

    def wants(self, name: PurePosixPath, *, folder: bool = False, within: str, ignored: bool = False) -> bool:
        """Hidden ones are not wanted, and nothing is said. What patterns leave out is counted."""
        if name.name.startswith("."):
            return False
        if not ignored and not self.inputs.leaves_out(name, folder=folder):
            return True
        self.unwanted.add((f"{within}:{name}", folder))
        return False

    def leaves_out_named(self, file: _File) -> bool:
        """Patterns see a path as it was typed, and of one that leads elsewhere the last name. What lies in a folder or an archive has names of its own."""
        path = file.path
        if path.name in ("", ".."):
            return False
        elsewhere = path.is_absolute() or ".." in path.parts
        holds_more = path.is_dir() or self.reader_of(file) is not None
        typed = PurePosixPath(path.name if elsewhere else path.as_posix())
        ignored = self.inputs.gitignore and not path.is_dir() and Ignored(path.parent).leaves_out(path, folder=False)
        if not ignored and not self.inputs.leaves_out(typed, folder=holds_more):
            return False
        self.unwanted.add((file.title, path.is_dir()))
        return True

    def walk(self, folder: Path) -> list[Path]:
        """The files of a folder that are wanted, in an order no file system decides. Links to folders are not followed."""
        found, ignored = [], Ignored(folder) if self.inputs.gitignore else None

        def wanted(path: Path, *, is_folder: bool) -> bool:
            relative = PurePosixPath(path.relative_to(folder).as_posix())
            told = ignored is not None and ignored.leaves_out(path, folder=is_folder)
            return self.wants(relative, folder=is_folder, within=str(folder), ignored=told)

        for place, folders, files in os.walk(folder, onerror=_unreadable):
            here = Path(place)
            if here != folder and is_ours(folders, files):
                self.skipped.append(("ours", f"{here} is a data store or a run"))
                folders[:] = []
                continue
            within = [here / name for name in sorted(folders)]
            folders[:] = [path.name for path in within if wanted(path, is_folder=True) and self.is_followed(path)]
            there = [here / name for name in sorted(files)]
            found += [path for path in there if wanted(path, is_folder=False) and self.is_plain(path)]
        return sorted(found)

    def is_followed(self, folder: Path) -> bool:
        if folder.is_symlink():
            self.skipped.append(("link", f"{folder} leads to a folder"))
        return not folder.is_symlink()

    def is_plain(self, path: Path) -> bool:
        """Or a link to what is."""
        try:
            what = SPECIAL.get(stat.S_IFMT(path.stat().st_mode))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                _unreadable(error)
            self.skipped.append(("link", f"{path} leads nowhere"))
            return False
        if what:
            self.skipped.append(("special", f"{path} is {what}"))
        return not what

    def file_or_members(self, file: _File) -> Iterator[_File]:
        reader = self.reader_of(file)
        if reader is None:
            yield file
            return
        before = self.members
        yield from self.unpacked(file, reader)
        if self.members == before:
            self.skipped.append(("empty", file.title))

    def reader_of(self, file: _File) -> _Members | None:
        """None of what is no archive."""
        name = file.path.name.lower()
        if file.path.stat().st_size == 0:
            return None
        # Many other files are a .zip inside, such as documents and programs; and whether a compressed file is a .tar shows after some work.
        if (file.named or name.endswith(".zip")) and unpacking.kind_of(file.path) == "zip":
            return self.zip_members
        return self.tar_members if (".tar" in name or name.endswith(TAR_ENDINGS)) and is_tar(file.path) else None

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

    def member_name(self, archive: _File, name: str, *, strange: tuple[str, str] | None) -> PurePosixPath | None:
        """As a folder's file would be called; None where it is not wanted, or is `strange`: (why, what) it is."""
        self.members += 1
        inside = PurePosixPath(*(part for part in PurePosixPath(name).parts if part not in ("/", "//", "..")))
        outermost_first = list(inside.parents)[-2::-1]
        wanted = all(self.wants(parent, folder=True, within=archive.title) for parent in outermost_first)
        if not wanted or not self.wants(inside, within=archive.title):
            return None
        if strange is not None:
            why, what = strange
            self.skipped.append((why, f"{archive.title}:{inside} is {what}"))
        return None if strange is not None else inside

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
                strange = ("link", "a link") if stat.S_ISLNK(entry.external_attr >> 16) else None
                if (name := self.member_name(archive, entry.filename, strange=strange)) is not None:
                    title = f"{archive.title}:{name}"
                    with unpacking.said(title):
                        content = unpacking.opened_member(packed, entry.filename, name=title)
                    with content:
                        yield name, _bounded(content, title, entry.file_size)

    def tar_members(
        self, archive: _File, advance: unpacking.Advance
    ) -> Iterator[tuple[PurePosixPath, unpacking.Stream]]:
        def wanted(member: tarfile.TarInfo) -> bool:
            return not member.isdir() and self.member_name(archive, member.name, strange=_strange(member)) is not None

        source = Source(path=archive.path, title=archive.title)
        with source.open(advance=advance) as packed:
            for member, content in tar_files(packed, name=archive.title, wanted=wanted):
                name = self.member_name(archive, member.name, strange=None)
                assert name is not None
                yield name, _bounded(content, f"{archive.title}:{name}", member.size)

    # --- those that are text

    def texts(self, files: Iterable[_File]) -> list[_File]:
        """What is neither empty nor binary nor there already."""
        waiting = [file for file in files if self.has_something(file) and self.is_text(file)]
        sizes = Counter(file.path.stat().st_size for file in waiting)
        seen, found = dict[str, _File](), []
        for file in waiting:
            if sizes[file.path.stat().st_size] > 1:
                with unpacking.said(file.title):
                    same = seen.setdefault(digest(file.path), file)
                if same is not file:
                    again = " again" * (same.title == file.title)
                    self.skipped.append(("duplicate", f"{file.title} is {same.title}{again}"))
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
        elif self.inputs.binary == "skip" and (code := code_of(head)):
            self.skipped.append((code, f"{file.title}; convert it to UTF-8"))
        elif self.inputs.binary == "skip" and is_binary(head):
            self.skipped.append(("binary", file.title))
        else:
            return True
        return False

    def why_none(self) -> str:
        told, counts = list[str](), Counter(why for why, _ in self.skipped if why != "unwanted")
        folders = sum(folder for _, folder in self.unwanted)
        many = {"file": len(self.unwanted) - folders, "folder": folders}
        if self.unwanted:
            what = " and ".join(f"{count:,} {one}{'s' * (count > 1)}" for one, count in many.items() if count)
            told.append(
                f"{self.inputs.in_words} left out {what} (patterns are as in .gitignore, such as *.txt or docs/)"
            )
        if counts:
            told.append(f"all {'else ' * bool(told)}that is there was skipped ({_counted(counts)})")
        if counts["binary"]:
            told.append("`binary=keep` takes those that are binary")
        if codes := sorted(set(MARKS.values()) & set(counts)):
            told.append(f"convert what is not UTF-8, as by: iconv -f {codes[0]} -t UTF-8")
        return "; ".join(told) or "there is no file that is not hidden"

    def source(self, file: _File, advance: unpacking.Advance) -> Source | records.Spooled | None:
        source = Source(path=file.path, title=file.title)
        form = records.format_of(file.title)
        if file.title == "standard input" and self.inputs.field:
            form = "jsonl"  # it has no name to tell; what streams in records is this
        if form is None:
            return source
        try:
            spooled = records.spool(
                source, form=form, field=self.inputs.field, into=self.scratch_file(), advance=advance
            )
        except records.NoRows as error:
            if file.named:
                raise
            self.skipped.append(("empty", str(error)))  # as an empty file that is found in a folder
            return None
        if file.path.parent == self.scratch:
            file.path.unlink()  # its text is all that is wanted
        if spooled.without_text:
            told = f"{file.title}: {spooled.without_text:,} without text in {' or '.join(spooled.field)}"
            self.skipped.append(("record", told))
            self.without_text += spooled.without_text
        return spooled


def check_paths(paths: Iterable[Path | str]) -> None:
    """An empty one would be read as the current folder."""
    if "" in paths:
        raise DataError(
            "a path is empty, as where a variable was not set; give a file or a folder, or . for all that is here"
        )


def gather(
    paths: Sequence[Path | str],
    *,
    scratch: Path,
    inputs: Inputs,
    standard_input: BinaryIO | None = None,
) -> Gathered:
    """Every text in `paths`, in order. The path `-` is standard input."""
    check_paths(paths)
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
        made = [one for file in files if (one := gathering.source(file, advance)) is not None]
    spooled = [one for one in made if isinstance(one, records.Spooled)]
    gathered = Gathered(
        sources=[one.source if isinstance(one, records.Spooled) else one for one in made],
        skipped=gathering.skipped,
        without_text=gathering.without_text,
        told=(*([] if inputs.field else _fields(spooled)), *_oddities(spooled)),
        records=sum(one.records for one in spooled),
        field=tuple(dict.fromkeys(name for one in spooled for name in one.field)),
    )
    if not gathered.sources:
        raise DataError(f"{' and '.join(map(str, paths))} holds no text: {gathering.why_none()}")
    return gathered


def _fields(spooled: Sequence[records.Spooled]) -> Iterator[str]:
    """Which were chosen."""
    counts = Counter((one.layout.form, one.field[0]) for one in spooled if one.field)
    for (form, name), count in counts.items():
        files = f"{count:,} .{form} file{'s' * (count > 1)}"
        yield f"the text of {files} was taken from the field {shown(name)}; name a field to take another"


def _oddities(spooled: Sequence[records.Spooled]) -> Iterator[str]:
    for one in spooled:
        if one.layout.in_words:
            yield f"{one.source.name}: {one.layout.in_words}"
        if one.mended:
            what = f"{one.mended:,} record{'s' * (one.mended > 1)}"
            yield f"{one.source.name}: half characters in {what} were written as U+FFFD"


def is_ours(folders: list[str], files: list[str]) -> bool:
    """Whether a folder that holds these was made by us: what was learned of a text, or made of it, is not text of its own."""
    store = "manifest.json" in files and any(name.endswith(".tokens.bin") for name in files)
    return store or ("config.json" in files and "checkpoints" in folders)


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}; leave it out with `exclude=`") from error


def _strange(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """(why it is left out, what it is) of a member that is no plain file."""
    if member.issym() or member.islnk():
        return "link", "a link"
    if member.isreg():
        return ("special", "a file with holes") if member.issparse() else None
    return "special", "a pipe" if member.isfifo() else "a device" if member.isdev() else "no plain file"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {why}" for why, count in sorted(counts.items()))


def code_of(head: bytes) -> str | None:
    """What a text is written in that says it itself and is not UTF-8."""
    return next((code for mark, code in MARKS.items() if head.startswith(mark)), None)


def is_binary(head: bytes) -> bool:
    control = len(head) - len(head.translate(None, CONTROL_CHARACTERS))
    return b"\0" in head or control > MOST_CONTROL_SHARE * len(head)


def _bounded(content: IO[bytes], name: str, size: int) -> unpacking.Stream:
    return unpacking.Stream(content, name=name, most=size, refusal=unpacking.too_large(name, size))
