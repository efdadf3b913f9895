"""How a long text is cut so that it streams and several workers (dealing.py) can share it. Knows bytes and lines, no tokens.

A piece ends at a line's end wherever there is one, and carries a little of the text before and after it, so that whoever
works on it alone can still see whether a document begins there.
"""

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from transformer_xl.console import progress
from transformer_xl.data.corpora.dealing import Engine, open_pool, ordered_map
from transformer_xl.data.corpora.sources import Source
from transformer_xl.data.corpora.unpacking import Advance

PIECE_BYTES = 4 << 20
MARGIN_BYTES = 4096

Shared = TypeVar("Shared")
Result = TypeVar("Result")
Fallback = Literal["character", "word", "none"]
"""Where to cut a line longer than a piece: at a character, at a space, or nowhere (then the line is one piece)."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A range of a source that belongs to one split, in bytes of its decompressed text."""

    source: Source
    start: int = 0
    stop: int | None = None

    @property
    def disk_bytes(self) -> int:
        """What is read of the disk; what is compressed is read from its beginning."""
        size = self.source.disk_bytes
        return size if self.stop is None or not self.source.plain else self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Piece:
    name: str
    offset: int
    """Where it begins in its source."""
    data: bytes
    before: bytes = b""
    after: bytes = b""
    first: bool = False
    last: bool = False
    starts: tuple[int, ...] = ()
    """Where records begin in `data`."""


@dataclass(frozen=True, kw_only=True)
class DocumentRule:
    """What begins a document. `pattern` ends just before one; `dropped` patterns are marks and not part of the text."""

    description: str
    at_parts: bool
    pattern: bytes | None = None
    dropped: bool = False

    def spans(self, piece: Piece) -> list[tuple[int, int]]:
        """(stop of the text before, start of the document) for each document beginning in the piece, in order."""
        spans = [(0, 0)] if piece.first and self.at_parts else []
        spans += [(start, start) for start in piece.starts if start or not spans]
        if self.pattern is None:
            return spans
        margin = len(piece.before)
        for match in re.finditer(self.pattern, piece.before + piece.data + piece.after, re.MULTILINE):
            begin, start = match.start() - margin, match.end() - margin
            if start < 0 or begin >= len(piece.data) or (start == len(piece.data) and not self.dropped):
                continue
            spans.append((max(begin, 0) if self.dropped else start, start))
        return sorted(set(spans)) if piece.starts else spans


NO_DOCUMENTS = DocumentRule(description="none are marked", at_parts=False)
BY_FILE = DocumentRule(description="a file's beginning", at_parts=True)
BY_BLANK_LINE = DocumentRule(
    description="a file's beginning or the first line after a blank one",
    at_parts=True,
    pattern=rb"^[ \t\r]*\n(?=[ \t\r]*[^ \t\r\n])",
)
BY_ARTICLE = DocumentRule(description="an article's heading", at_parts=False, pattern=rb"^ \n(?= = [^=\n]+ = \n \n)")


def by_separator(line: str) -> DocumentRule:
    return DocumentRule(
        description=f"a file's beginning or the line after {line!r}, which is not part of the text",
        at_parts=True,
        pattern=b"^" + re.escape(line.encode()) + rb"[ \t\r]*(?:\n|\Z)",
        dropped=True,
    )


def cut(parts: Iterable[Part], *, fallback: Fallback, advance: Advance | None = None) -> Iterator[Piece]:
    """The parts one after the other, in pieces."""
    for part in parts:
        name, buffer, before, offset, first = part.source.name, b"", b"", part.start, True
        starts = part.source.record_starts()
        for data in _read(part, advance):
            buffer = buffer + data if buffer else data
            # The margin stays behind, so that a piece always sees what follows it.
            while (limit := len(buffer) - MARGIN_BYTES) >= PIECE_BYTES and (end := cut_point(buffer, limit, fallback)):
                data, buffer = buffer[:end], buffer[end:]
                after = buffer[:MARGIN_BYTES]
                inside = _between(starts, offset, offset + end)
                yield Piece(name=name, offset=offset, data=data, before=before, after=after, first=first, starts=inside)
                # The last line of a piece, whole or, where it is very long, its end.
                line = data.rfind(b"\n", 0, len(data) - 1) + 1
                before, offset, first = data[max(line, len(data) - MARGIN_BYTES) :], offset + end, False
        inside = _between(starts, offset, offset + len(buffer))
        yield Piece(name=name, offset=offset, data=buffer, before=before, first=first, last=True, starts=inside)


def _between(starts: NDArray[np.int64] | None, begin: int, end: int) -> tuple[int, ...]:
    if starts is None:
        return ()
    first, last = np.searchsorted(starts, (begin, end))
    return tuple((starts[first:last] - begin).tolist())


def _read(part: Part, advance: Advance | None) -> Iterator[bytes]:
    if part.start == 0 and part.stop is None:
        yield from part.source.blocks(advance=advance)
        return
    with part.source.open(advance=advance) as stream:
        stream.seek(part.start)
        left = part.stop - part.start if part.stop is not None else None
        while data := stream.read(PIECE_BYTES if left is None else min(left, PIECE_BYTES)):
            yield data
            left = None if left is None else left - len(data)


def cut_point(buffer: bytes, limit: int, fallback: Fallback) -> int:
    """The last good place to cut at or before `limit`; 0 when there is none."""
    if end := buffer.rfind(b"\n", 0, limit) + 1:
        return end
    if fallback == "word":
        return buffer.rfind(b" ", 0, limit) + 1
    if fallback == "character":
        # A UTF-8 character has at most three continuation bytes; text that is not UTF-8 may be cut anywhere.
        return next((end for end in range(limit, max(limit - 4, 0), -1) if buffer[end] & 0xC0 != 0x80), limit)
    return 0


def total_bytes(parts: Sequence[Part]) -> int:
    """Bytes on disk: what reading them all will take, as near as can be known beforehand."""
    return sum(part.disk_bytes for part in parts)


def each_piece(
    parts: Sequence[Part],
    work: Callable[[Shared, Piece], Result],
    shared: Shared,
    *,
    fallback: Fallback,
    title: str,
    engine: Engine,
) -> Generator[Result, None, None]:
    """`work(shared, piece)` for each piece, in order, whoever the engine has do it."""
    total = total_bytes(parts)
    with (
        progress(title, total=total, unit="bytes") as advance,
        open_pool(engine, work, shared, text_bytes=total) as pool,
        closing(ordered_map(pool, cut(parts, fallback=fallback, advance=advance))) as results,
    ):
        yield from results
