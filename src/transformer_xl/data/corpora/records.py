"""Records at rest (.jsonl, .csv, .tsv, .parquet) become text: one document after another in one plain file, and where each begins.

    {"user": {"name": "ann"}, "text": "hello"}        hello\\n        0
    {"user": {"name": "bob"}, "text": "well?"}   ->   well?\\n        6

One record is held at a time. What cannot be read is named by its file and line.
"""

import csv
import json
import re
from array import array
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import IO, Any, Literal

from transformer_xl.data.corpora import unpacking
from transformer_xl.data.corpora.sources import COMPRESSED_ENDINGS, Source
from transformer_xl.data.corpora.unpacking import Advance
from transformer_xl.errors import DataError, MissingPackage, shown

Format = Literal["jsonl", "csv", "tsv", "parquet"]
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
MOST_RECORD_BYTES = 64 << 20
"""A record is read whole; no book is as long."""
LOOKED_AT = 100
"""Records that tell which field holds the text, where nobody says it."""
DEEPEST_NAME = 4
"""Levels of nested names that are looked through for text, to suggest one."""
USUAL_NAMES = ("text", "content", "body", "message")
ROWS_AT_ONCE = 64
TAB = "\t"
HALF_CHARACTERS = re.compile("[\ud800-\udfff]")
"""Half of a pair: JSON can write it, UTF-8 cannot."""

JSON = json.JSONDecoder(parse_int=float)
"""Numbers are no text, and Python's own whole ones end at some thousand digits."""

Row = tuple[str, object]
"""(where it stands, such as `line 3`; the record)"""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a file is laid out, and read."""

    form: Format
    delimiter: str = ","
    """Between the columns of a table."""
    quoted: bool = True
    """Whether a quote that begins a cell of a table is no part of it."""

    @property
    def in_words(self) -> str:
        """What is not as its name says."""
        usual = TAB if self.form == "tsv" else ","
        parted = f"columns are parted by {'tabs' if self.delimiter == TAB else self.delimiter}"
        told = [parted] * (self.delimiter != usual)
        return " and ".join([*told, *["quotes are read as they are, because they do not pair"] * (not self.quoted)])


@dataclass(frozen=True, kw_only=True)
class Spooled:
    """The text of a file of records."""

    source: Source
    layout: Layout
    field: tuple[str, ...]
    records: int
    without_text: int
    """Records that have no such field, or nothing in it: left out."""
    mended: int
    """Records with half characters, which are written as U+FFFD."""


class NoRows(DataError):
    """A table of a first line alone."""


class _NoRow(DataError):
    """Of a table; read in another way, it may be one."""


def format_of(name: str) -> Format | None:
    """By its name, without the ending of what it is compressed by."""
    path = PurePosixPath(name.lower())
    return FORMATS.get(PurePosixPath(path.stem).suffix if path.suffix in COMPRESSED_ENDINGS else path.suffix)


def spool(source: Source, *, form: Format, field: tuple[str, ...], into: Path, advance: Advance) -> Spooled:
    """Writes the text of every record to the file `into`, each ended by a line's end, and beside it where each begins."""
    layout = _layout(source, form)
    try:
        return _spooled(source, layout, field, into, advance)
    except _NoRow as error:
        # A .tsv has no quotes by its definition, and many programs write some.
        if form != "tsv":
            raise
        try:
            return _spooled(source, replace(layout, quoted=False), field, into, lambda _: None)
        except _NoRow:
            raise error from None


def _spooled(source: Source, layout: Layout, field: tuple[str, ...], into: Path, advance: Advance) -> Spooled:
    names = field or _chosen_field(source, layout)
    most = unpacking.most_unpacked(source.disk_bytes)
    starts, position, without_text, mended, seen = array("q"), 0, 0, 0, set[str]()
    begins = into.with_name(f"{into.name}.starts")
    with into.open("wb") as target, begins.open("wb") as index, closing(_rows(source, layout, names, advance)) as rows:
        for place, record in rows:
            if len(seen) < LOOKED_AT and isinstance(record, dict):
                seen.update(islice(record, LOOKED_AT))
            text = _text(record, names, where=f"{source.name}, {place}")
            if not text.strip():
                without_text += 1
                continue
            whole = HALF_CHARACTERS.sub("\ufffd", text)
            mended += whole != text
            starts.append(position)
            position += target.write(whole.encode() + b"\n" * (not whole.endswith("\n")))
            if position > most:
                raise unpacking.too_large(source.name, most)
            if len(starts) >= LOOKED_AT * LOOKED_AT:
                _drain(starts, index)
        _drain(starts, index)
    records = begins.stat().st_size // starts.itemsize
    if not records:
        what = f"{source.name} has no text in {' or '.join(names) or 'it'}"
        if not seen and not without_text:
            raise NoRows(what)
        there = f"; its fields are {_listed(seen)}" if seen else ""
        raise DataError(f"{what}{there}; name another field, or leave it out by `exclude=`")
    text_source = Source(path=into, title=source.name, starts=begins)
    counts = {"records": records, "without_text": without_text, "mended": mended}
    return Spooled(source=text_source, layout=layout, field=names, **counts)


def _drain(starts: "array[int]", index: IO[bytes]) -> None:
    starts.tofile(index)
    del starts[:]


# --- which field


def _chosen_field(source: Source, layout: Layout) -> tuple[str, ...]:
    """The one that holds text, or that is called so. None where every record is a text itself."""
    texts, worded, nested, others = Counter[str](), Counter[str](), set[str](), dict[str, str]()
    with closing(_rows(source, layout, (), lambda _: None)) as rows:
        for _, record in islice(rows, LOOKED_AT):
            for name, value in record.items() if isinstance(record, dict) else ():
                if text := _example(value):
                    texts[name] += 1
                    worded[name] += _is_worded(text)
                else:
                    others[name] = "nothing" if value in (None, "", [], {}) else _kind(value)
                    nested.update(_names_of_texts(value, name, depth=1))
    if not texts and not others:
        return ()
    usual = [name for name in texts if name.lower() in USUAL_NAMES]
    words = [name for name in texts if 2 * worded[name] >= texts[name]]
    for found in (usual, list(texts), words):
        if len(found) == 1:
            return (found[0],)
    named = f"{source.name}{', whose first line names the columns,' * (layout.form in ('csv', 'tsv'))}"
    if not texts and not nested:
        told = _listed({f"{name} ({kind})" for name, kind in others.items()})
        plain = f", or read it as plain text: txl prepare - < {source.name}" * (layout.form != "parquet")
        raise DataError(f"{named} has no field that holds text: {told}; give records that have one{plain}")
    likely = (usual or words or [*texts, *sorted(nested)])[0]
    raise DataError(
        f"{named} has text in {_listed({*texts, *nested})}; say which is meant, such as `field={quote(likely)}`"
    )


def _example(value: object) -> str:
    """What a text, or a list of texts, has in it; nothing where it is neither."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return "\n".join(value)
    if isinstance(value, bytes):
        return value.decode(errors="ignore")
    return value if isinstance(value, str) else ""


def _is_worded(text: str) -> bool:
    """Numbers, dates and names by which programs know things are not: one word without letters, or with digits in it."""
    return any(map(str.isalpha, text)) and (len(text.split(maxsplit=1)) > 1 or not any(map(str.isdigit, text)))


def _names_of_texts(value: object, name: str, *, depth: int) -> Iterator[str]:
    """The nested names of the texts in it, `name` before them."""
    if _example(value):
        yield name
    elif depth <= DEEPEST_NAME and isinstance(value, list | dict):
        named = [(f"{name}.{key}", one) for key, one in value.items()] if isinstance(value, dict) else []
        for inner, one in islice(named or ((name, one) for one in value), LOOKED_AT):
            yield from _names_of_texts(one, inner, depth=depth + 1)


def _listed(names: set[str]) -> str:
    told = sorted(names)
    return ", ".join(told[:20]) + f" and {len(told) - 20} more" * (len(told) > 20)


def _text(record: object, names: tuple[str, ...], *, where: str) -> str:
    if not names:
        if not isinstance(record, str):
            told = f"this is {_kind(record)}, and a record is an object that has a text in it, or a text"
            raise DataError(f"{where}: {told}; give all of them one form, one a line")
        return record
    if not isinstance(record, dict):
        raise DataError(f"{where}: this is {_kind(record)} and has no field {names[0]}; give a record a line")
    try:
        return "\n".join(text for name in names for text in _texts(record, name.split("."), 0, where=where))
    except RecursionError:
        raise DataError(f"{where}: lists are nested too deeply to be text") from None


def _texts(value: object, names: list[str], at: int, *, where: str) -> Iterator[str]:
    """What lies under nested names, from the one `at` on; of a list, what lies under each of its members."""
    here, rest = ".".join(names[:at]), ".".join(names[at:])
    if value is None:
        return
    if isinstance(value, list):
        for member in value:
            yield from _texts(member, names, at, where=where)
    elif rest and isinstance(value, dict):
        if rest in value:  # a name that has a dot in it
            yield from _texts(value[rest], names, len(names), where=where)
        elif names[at] in value:
            yield from _texts(value[names[at]], names, at + 1, where=where)
    elif rest:
        raise DataError(f"{where}: {here} is {_kind(value)} and has no field {rest}; name another with `field=`")
    elif isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield _decoded(value, where=f"{where}: {here}")
    else:
        raise DataError(f"{where}: {here} is {_kind(value)} there, not text; name a field of texts with `field=`")


def _kind(value: object) -> str:
    kinds: list[tuple[type, str]] = [(bool, "true or false"), (int, "a number"), (float, "a number"), (str, "a text")]
    kinds += [(list, "a list"), (dict, "an object"), (type(None), "null")]
    return next((kind for which, kind in kinds if isinstance(value, which)), f"a {type(value).__name__}")


# --- rows of each format


def _layout(source: Source, form: Format) -> Layout:
    """A .csv may be parted by semicolons or tabs, as it is where the comma is for decimals: where the names of its columns are."""
    if form != "csv":
        return Layout(form=form, delimiter=TAB if form == "tsv" else ",")
    with closing(_lines(source, lambda _: None)) as lines:
        first = next((line for _, line in lines if line.strip()), "")
    return Layout(form=form, delimiter=next((mark for mark in (",", ";", TAB) if mark in first), ","))


def _rows(source: Source, layout: Layout, field: tuple[str, ...], advance: Advance) -> Generator[Row, None, None]:
    if layout.form == "parquet":
        return _parquet_rows(source, field, advance)
    return _json_rows(source, advance) if layout.form == "jsonl" else _table_rows(source, layout, advance)


def _json_rows(source: Source, advance: Advance) -> Generator[Row, None, None]:
    for number, line in _lines(source, advance):
        if not line.strip():
            continue
        try:
            record = JSON.decode(line)
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
            raise DataError(f"{source.name}, line {number:,} is no JSON: {why}; mend it, or leave it out") from None
        yield f"line {number:,}", record


def _table_rows(source: Source, layout: Layout, advance: Advance) -> Generator[Row, None, None]:
    """The first line names the columns. A row may go over many lines, in quotes."""
    here, begin, fed = 0, 1, 0

    def lines() -> Iterator[str]:
        nonlocal here, fed
        for number, line in _lines(source, advance):
            fed += len(line) + 1
            if fed > MOST_RECORD_BYTES:
                raise _NoRow(str(_too_long(source, begin)))
            here = number
            yield line + "\n"

    before = csv.field_size_limit(2 * MOST_RECORD_BYTES)  # ours comes first
    try:
        rows = csv.reader(
            lines(),
            delimiter=layout.delimiter,
            quoting=csv.QUOTE_MINIMAL if layout.quoted else csv.QUOTE_NONE,
            strict=True,
        )
        names = list[str]()
        while True:
            begin, fed = here + 1, 0
            try:
                row = next(rows, None)
            except csv.Error as error:
                why = str(error)
                if "new-line" in why:  # goes on with advice to programmers
                    why = "a carriage return stands in it by itself; end lines with a line feed, and quote cells that have one"
                raise _NoRow(
                    f"{source.name}, line {begin:,} is no row of a table: {why}; mend it, or leave it out"
                ) from None
            if row is None:
                return
            if not row:
                continue
            if not names:
                names = row
                if twice := [name for name in names if name and names.count(name) > 1]:
                    raise DataError(
                        f"{source.name} has two columns called {shown(twice[0])} in its first line; give one of them another name, or leave it out"
                        " by `exclude=`"
                    )
                continue
            if len(row) != len(names):
                how = f" ({layout.in_words})" * bool(layout.in_words)
                told = f"{len(row)} columns where the first line names {len(names)}{how}"
                raise _NoRow(f"{source.name}, line {begin:,} has {told}; mend it, or leave it out")
            yield f"line {begin:,}", dict(zip(names, row, strict=True))
    finally:
        csv.field_size_limit(before)


def _lines(source: Source, advance: Advance) -> Generator[tuple[int, str], None, None]:
    """Numbered from 1, without their ends."""
    number, rest = 0, b""
    with source.open(advance=advance) as stream:
        while block := stream.read(unpacking.BLOCK):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                number += 1
                yield number, _line(source, number, line)
            _check_length(source, number + 1, rest)
    if rest:
        yield number + 1, _line(source, number + 1, rest)


def _check_length(source: Source, number: int, line: bytes) -> None:
    if len(line) > MOST_RECORD_BYTES:
        raise _too_long(source, number)


def _line(source: Source, number: int, line: bytes) -> str:
    _check_length(source, number, line)
    text = _decoded(line.removesuffix(b"\r"), where=f"{source.name}, line {number:,}")
    return text.removeprefix("\ufeff") if number == 1 else text  # the mark that some editors begin a file with


def _decoded(data: bytes, *, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 at its byte {error.start + 1:,} (0x{data[error.start]:02x}); convert it"
        ) from None


def _too_long(source: Source, number: int) -> DataError:
    return DataError(
        f"{source.name}, line {number:,} has more than {MOST_RECORD_BYTES:,} bytes, which no record has; cut it into several"
    )


def _parquet_rows(source: Source, field: tuple[str, ...], advance: Advance) -> Generator[Row, None, None]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingPackage(
            f"{source.name} needs pyarrow to be read; install it with: pip install 'transformer-xl[data]'"
        ) from None
    if not source.plain:
        raise DataError(f"{source.name} is a compressed .parquet, which is read from its end; unpack it first")
    number, told = 0, 0
    with unpacking.said(source.name), source.path.open("rb") as file:
        table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=unpacking.BLOCK)
        total = max(table.metadata.num_rows, 1)
        columns = {name for name in table.schema_arrow.names if any(f"{one}.".startswith(f"{name}.") for one in field)}
        # No field named yet, or none of those: every column, so that a sentence can tell which there are.
        batches = table.iter_batches(batch_size=ROWS_AT_ONCE, columns=sorted(columns) or None)
        while (rows := _next_rows(batches)) is not None:
            for row in rows:
                number += 1
                yield f"row {number:,}", row
            done = source.disk_bytes * min(number, total) // total
            advance(done - told)
            told = done


def _next_rows(batches: Iterator[Any]) -> list[dict[str, object]] | None:
    batch = next(batches, None)
    return None if batch is None else batch.to_pylist()
