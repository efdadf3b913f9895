"""A text of any length -> a compressed file, and back, in memory that does not grow with it. Nothing leaves before its checksum was compared."""

import shutil
from collections.abc import Callable, Iterator
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, Literal

from transformer_xl.compression.archive import (
    BLOCK,
    CHECKSUM,
    PIECE,
    Block,
    Head,
    Readable,
    TextChecksum,
    checksum_of,
    read_blocks,
    read_exactly,
    read_head,
)
from transformer_xl.compression.text_coder import TextCoder
from transformer_xl.console import Advance
from transformer_xl.errors import DataError

Level = Literal["fast", "best"]
LANES: dict[Level, tuple[int, int]] = {"fast": (1 << 11, 32), "best": (1 << 20, 1)}
"""Bytes that a lane has at least, and how many lanes there are at most."""
MOST_ADDED = 64
"""Bytes by which a text that can be read twice grows at most."""
MakeCoder = Callable[[int], TextCoder]
"""Of so many lanes."""


def compress_stream(
    source: Readable, out: BinaryIO, make_coder: MakeCoder, *, level: Level, advance: Advance, again: bool = False
) -> tuple[int, int]:
    """How many bytes were read, and written. `again`: the source can be read a second time, and `out` written, where that makes it smaller."""
    blocks = _blocks(source)
    data, last = next(blocks)
    each, most = LANES[level]
    coder = make_coder(max(1, min(most, len(data) // each)))
    head = Head(fingerprint=coder.fingerprint[:CHECKSUM], lanes=coder.lanes).to_bytes()
    before, read, written = checksum_of(head), 0, out.write(head)
    while True:
        stream = coder.encode(data, advance=advance) if data else None
        if stream is None:
            coder.reset()
        found = TextChecksum(before, last=last).add(data).value()
        block = Block(size=len(data), stream=stream, checksum=found, last=last)
        written += out.write(block.head(before)) + out.write(data if stream is None else stream)
        before, read = block.checksum, read + len(data)
        if last:
            break
        data, last = next(blocks)
    if again and written > read + MOST_ADDED:
        written = _store(source, out, head, size=read)  # type: ignore[arg-type]
    return read, written


def decompress_stream(
    source: Readable, out: BinaryIO, make_coder: MakeCoder, *, name: str, advance: Advance, hold: bool
) -> int:
    """How many bytes were written. `hold` back what is not known to be right, where `out` cannot forget it."""
    head = read_head(source, name=name)
    coder, written = make_coder(head.lanes), 0
    if coder.fingerprint[:CHECKSUM] != head.fingerprint:
        raise DataError(
            f"{name} was compressed with another model (its fingerprint is {head.fingerprint.hex()}, this one's {coder.fingerprint[:CHECKSUM].hex()});"
            " give that one with `model=`"
        )
    before = checksum_of(head.to_bytes())
    for block in read_blocks(source, head, name=name):
        if block.stream is not None:
            data = coder.decode(block.stream, block.size, advance=advance)
            if len(data) != block.size or TextChecksum(before, last=block.last).add(data).value() != block.checksum:
                raise _changed(name)
            out.write(data)
        else:
            _give_stored(source, out, block, before, name=name, advance=advance, hold=hold)
            coder.reset()
        before, written = block.checksum, written + block.size
    return written


def survey(source: Readable, *, name: str) -> int:
    """The size of what it holds, once every block is known to be as it was written: minutes before the last is decoded. No model is asked."""
    head = read_head(source, name=name)
    before, size = checksum_of(head.to_bytes()), 0
    for block in read_blocks(source, head, name=name):
        if block.stream is None:
            _give_stored(source, None, block, before, name=name, advance=_nobody, hold=False)
        before, size = block.checksum, size + block.size
    return size


def _blocks(source: Readable) -> Iterator[tuple[bytes, bool]]:
    """Each with whether it is the last."""
    data = _up_to(source, BLOCK)
    while len(data) == BLOCK and (after := _up_to(source, BLOCK)):
        yield data, False
        data = after
    yield data, True


def _up_to(source: Readable, size: int) -> bytes:
    """A pipe gives what it has."""
    parts = list[bytes]()
    while size and (part := source.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _store(source: BinaryIO, out: BinaryIO, head: bytes, *, size: int) -> int:
    """All of it as one block. What is certain only in the end is written in its place then."""
    source.seek(0)
    out.seek(0)
    out.truncate()
    before = checksum_of(head)
    text = TextChecksum(before, last=True)
    out.write(head + Block(size=size, stream=None, checksum=bytes(CHECKSUM), last=True).head(before))
    missing = size
    while missing:
        part = read_exactly(
            source, min(missing, PIECE), name="the text", short="the text became shorter while it was read"
        )
        text.add(part)
        missing -= out.write(part)
    end = out.tell()
    block = Block(size=size, stream=None, checksum=text.value(), last=True)
    out.seek(len(head))
    out.write(block.head(before))
    out.seek(end)
    return end


def _give_stored(
    source: Readable, out: BinaryIO | None, block: Block, before: bytes, *, name: str, advance: Advance, hold: bool
) -> None:
    text, missing = TextChecksum(before, last=block.last), block.size
    with SpooledTemporaryFile(max_size=BLOCK) as held:
        sink = held if hold else out
        while missing:
            part = read_exactly(source, min(missing, PIECE), name=name)
            text.add(part)
            if sink is not None:
                sink.write(part)
            missing -= len(part)
            advance(len(part))
        if text.value() != block.checksum:
            raise _changed(name)
        if hold and out is not None:
            held.seek(0)
            shutil.copyfileobj(held, out)


def _changed(name: str) -> DataError:
    return DataError(
        f"{name} is damaged: what it holds has another checksum than what was compressed; nothing was taken from it"
    )


def _nobody(amount: float = 1, *, note: str | None = None) -> None:
    """Is told how far it is."""
