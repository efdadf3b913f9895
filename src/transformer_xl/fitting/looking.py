"""What is there: how much text, of what kind. Everything is read once, and nothing is kept."""

import codecs
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformer_xl.console import progress
from transformer_xl.data.corpora.inputs import STANDARD_INPUT, Gathered, gather
from transformer_xl.data.corpora.selection import Inputs
from transformer_xl.data.text.tokenizers import STRAY
from transformer_xl.errors import DataError

READ_AT_ONCE = 1 << 20
FEWEST_BYTES = 5_000
"""Of a text that is worth a model."""
MOST_STRAY = 0.1
"""Share of bytes that are no UTF-8 in what is still a text: in byte pairs each is a token by itself."""
SMALL_SHARE = 0.05
"""Of all text, which a small file has at most."""
PIECES, PIECE_BYTES = 16, 2048
"""Of a sample: at least so many where there is enough text, and fewer than twice as many."""
Piece = bytes


@dataclass(frozen=True, kw_only=True)
class Findings:
    files: int
    records: int
    bytes: int
    small: tuple[int, int]
    """How many files are small, and how many bytes they have together."""
    lines: int
    stray_bytes: int
    """That are no UTF-8."""
    skipped: dict[str, int]
    sample: tuple[Piece, ...] = field(default=(), repr=False)
    """Pieces from everywhere in it."""

    @property
    def is_text(self) -> bool:
        return self.stray_bytes <= MOST_STRAY * self.bytes

    @property
    def in_words(self) -> str:
        what = f"{self.records:,} records" if self.records else f"{self.files:,} file{'s' * (self.files != 1)}"
        stray = f"{self.stray_bytes:,} byte{'s' * (self.stray_bytes != 1)}"
        kind = "no UTF-8" if not self.is_text else "UTF-8 text" + (f" but for {stray}" if self.stray_bytes else "")
        left_out = "".join(f", {count:,} {why} left out" for why, count in self.skipped.items())
        return f"{what}, {self.bytes / 1e6:,.2f} MB, {self.lines:,} lines, {kind}{left_out}"


def look(paths: Sequence[Path | str], *, inputs: Inputs) -> Findings:
    """Reads everything once."""
    if STANDARD_INPUT in map(str, paths):
        raise DataError("standard input can be read once, and txl fit reads its text twice; write it to a file first")
    with tempfile.TemporaryDirectory(prefix="txl-fit-") as name:
        return _findings(gather(paths, scratch=Path(name), inputs=inputs))


def _findings(gathered: Gathered) -> Findings:
    sizes: list[int] = []
    sample = Sample()
    lines, stray = 0, 0
    with progress("looking", total=sum(source.disk_bytes for source in gathered.sources), unit="bytes") as advance:
        for source in gathered.sources:
            decoder, size = codecs.getincrementaldecoder("utf-8")("surrogateescape"), 0
            with source.open(advance=advance) as stream:
                while data := stream.read(READ_AT_ONCE):
                    size, lines = size + len(data), lines + data.count(b"\n")
                    stray += _strays(decoder.decode(data))
                    sample.add(data)
            stray += _strays(decoder.decode(b"", True))
            sizes.append(size)
    total = sum(sizes)
    small = [size for size in sizes if size <= SMALL_SHARE * total]
    if total < FEWEST_BYTES:
        raise DataError(f"there are {total:,} bytes of text, too few to learn from; give {FEWEST_BYTES:,} or more")
    return Findings(
        files=len(gathered.sources),
        records=gathered.records,
        bytes=total,
        small=(len(small), sum(small)),
        lines=lines,
        stray_bytes=stray,
        skipped=dict(gathered.counts),
        sample=tuple(sample.pieces),
    )


class Sample:
    """Pieces of a text whose length is not known beforehand, at any time spread evenly over what has been read."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.apart = PIECE_BYTES
        """Bytes from the beginning of one piece to that of the next."""
        self.read = 0

    def add(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            place = self.read % self.apart
            if place == 0:
                if len(self.pieces) == 2 * PIECES:
                    del self.pieces[1::2]
                    self.apart *= 2
                self.pieces.append(b"")
            step = self.apart - place
            if place < PIECE_BYTES:
                step = PIECE_BYTES - place
                self.pieces[-1] += data[at : at + step]
            self.read += len(data[at : at + step])
            at += step


def _strays(text: str) -> int:
    return sum(map(len, STRAY.findall(text)))


def on_disk(paths: Sequence[str]) -> tuple[int, int]:
    """Files below the paths and their bytes, without reading them: enough to see that a text has grown."""
    files = [file for path in map(Path, paths) for file in (path.rglob("*") if path.is_dir() else [path])]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return len(sizes), sum(sizes)
