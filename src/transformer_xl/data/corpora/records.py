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
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
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
USUAL_NAMES = ("text", "content", "body", "message")
ROWS_AT_ONCE = 64
HALF_CHARACTERS = re.compile("[\ud800-\udfff]")
"""Half of a pair: JSON can write it, UTF-8 cannot."""

Row = tuple[str, object]
"""(where it stands, such as `line 3`; the record)"""


@dataclass(frozen=True, kw_only=True)
class Spooled:
    """The text of a file of records."""

    source: Source
    field: tuple[str, ...]
    records: int
    without_text: int
    """Records that have no such field, or nothing in it: left out."""
    mended: int
    """Records with half characters, which are written as U+FFFD."""


def format_of(name: str) -> Format | None:
    """By its name, without the ending of what it is compressed by."""
    path = PurePosixPath(name.lower())
    return FORMATS.get(PurePosixPath(path.stem).suffix if path.suffix in COMPRESSED_ENDINGS else path.suffix)


def spool(source: Source, *, form: Format, field: tuple[str, ...], into: Path, advance: Advance) -> Spooled:
    """Writes the text of every record to the file `into`, each ended by a line's end, and beside it where each begins."""
    names = field or _chosen_field(source, form)
    most = unpacking.most_unpacked(source.disk_bytes)
    starts, position, without_text, mended, seen = array("q"), 0, 0, 0, set[str]()
    begins = into.with_name(f"{into.name}.starts")
    with into.open("wb") as target, begins.open("wb") as index, closing(_rows(source, form, names, advance)) as rows:
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
        there = f"; its fields are {_listed(seen)}" if seen else ""
        raise DataError(f"{source.name} has no text in {' or '.join(names) or 'it'}{there}")
    text_source = Source(path=into, title=source.name, starts=begins)
    return Spooled(source=text_source, field=names, records=records, without_text=without_text, mended=mended)


def _drain(starts: "array[int]", index: IO[bytes]) -> None:
    starts.tofile(index)
    del starts[:]


# --- which field


def _chosen_field(source: Source, form: Format) -> tuple[str, ...]:
    """The one that holds text, or that is called so. None where every record is a text itself."""
    strings, lettered, prose, others = Counter[str](), Counter[str](), Counter[str](), set[str]()
    with closing(_rows(source, form, (), lambda _: None)) as rows:
        for _, record in islice(rows, LOOKED_AT):
            for name, value in record.items() if isinstance(record, dict) else ():
                if isinstance(value, str) and value:
                    strings[name] += 1
                    has_letters = any(map(str.isalpha, value))
                    lettered[name] += has_letters
                    prose[name] += has_letters and len(value.split(maxsplit=1)) > 1
                else:
                    others.add(name)
    if not strings and not others:
        return ()
    usual = [name for name in strings if name.lower() in USUAL_NAMES]
    words = [name for name in strings if 2 * lettered[name] >= strings[name]]
    likely = [name for name in strings if 2 * prose[name] >= strings[name]]
    for found in (usual, list(strings), words, likely):
        if len(found) == 1:
            return (found[0],)
    example = (usual or likely or [*strings, *others])[0]
    raise DataError(
        f"{source.name} has the fields {_listed({*strings, *others})}; say which holds the text, such as `field={example}`"
    )


def _listed(names: set[str]) -> str:
    told = sorted(names)
    return ", ".join(told[:20]) + f" and {len(told) - 20} more" * (len(told) > 20)


def _text(record: object, names: tuple[str, ...], *, where: str) -> str:
    if not names:
        if not isinstance(record, str):
            raise DataError(
                f"{where}: this is {_kind(record)} where the records before it are texts; give them one form"
            )
        return record
    if not isinstance(record, dict):
        raise DataError(f"{where}: this is {_kind(record)} and has no field {names[0]}; give a record a line")
    try:
        return "\n".join(text for name in names for text in _texts(record, name.split("."), where=f"{where}: {name}"))
    except RecursionError:
        raise DataError(f"{where}: lists are nested too deeply to be text") from None


def _texts(value: object, names: list[str], *, where: str) -> Iterator[str]:
    """What lies under nested names; of a list, what lies under each of its members."""
    if value is None:
        return
    if isinstance(value, list):
        for member in value:
            yield from _texts(member, names, where=where)
    elif names and isinstance(value, dict):
        whole = ".".join(names)
        if whole in value:  # a name that has a dot in it
            yield from _texts(value[whole], [], where=where)
        elif names[0] in value:
            yield from _texts(value[names[0]], names[1:], where=where)
    elif isinstance(value, str) and not names:
        yield value
    elif isinstance(value, bytes) and not names:
        yield _decoded(value, where=where)
    else:
        raise DataError(f"{where} is {_kind(value)} there, not text; name a field of texts with `field=`")


def _kind(value: object) -> str:
    kinds: list[tuple[type, str]] = [(bool, "true or false"), (int, "a number"), (float, "a number"), (str, "a text")]
    kinds += [(list, "a list"), (dict, "an object"), (type(None), "null")]
    return next((kind for which, kind in kinds if isinstance(value, which)), f"a {type(value).__name__}")


# --- rows of each format


def _rows(source: Source, form: Format, field: tuple[str, ...], advance: Advance) -> Generator[Row, None, None]:
    if form == "parquet":
        return _parquet_rows(source, field, advance)
    readers: dict[str, Callable[[Source, Advance], Generator[Row, None, None]]] = {
        "jsonl": _json_rows,
        "csv": lambda source, advance: _table_rows(source, advance, delimiter=","),
        "tsv": lambda source, advance: _table_rows(source, advance, delimiter="\t"),
    }
    return readers[form](source, advance)


def _json_rows(source: Source, advance: Advance) -> Generator[Row, None, None]:
    for number, line in _lines(source, advance):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
            raise DataError(f"{source.name}, line {number:,} is no JSON: {why}; mend it, or leave it out") from None
        yield f"line {number:,}", record


def _table_rows(source: Source, advance: Advance, *, delimiter: str) -> Generator[Row, None, None]:
    """The first line names the columns. A row may go over many lines, in quotes."""
    here, begin, fed = 0, 1, 0

    def lines() -> Iterator[str]:
        nonlocal here, fed
        for number, line in _lines(source, advance):
            fed += len(line) + 1
            if fed > MOST_RECORD_BYTES:
                raise _too_long(source, begin)
            here = number
            yield line + "\n"

    before = csv.field_size_limit(2 * MOST_RECORD_BYTES)  # ours comes first
    try:
        rows, names = csv.reader(lines(), delimiter=delimiter, strict=True), list[str]()
        while True:
            begin, fed = here + 1, 0
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise DataError(
                    f"{source.name}, line {begin:,} is no row of a table: {error}; mend it, or leave it out"
                ) from None
            if row is None:
                return
            if not row:
                continue
            if not names:
                names = row
                if len(set(names)) < len(names):
                    raise DataError(f"{source.name} has two columns of one name in its first line: {shown(names)}")
                continue
            if len(row) != len(names):
                told = f"{len(row)} columns where the first line names {len(names)}"
                raise DataError(f"{source.name}, line {begin:,} has {told}; mend it, or leave it out")
            yield f"line {begin:,}", dict(zip(names, row, strict=True))
    finally:
        csv.field_size_limit(before)


def _lines(source: Source, advance: Advance) -> Iterator[tuple[int, str]]:
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
