"""The format of a compressed file: a head, then blocks, each with its own checksums. Knows no model.

    head    magic 4  version 1  fingerprint 8  lanes 1
    block   kind 1  size n  [stream n]  checksum 8  crc 4   then the stream, or for a stored block the bytes themselves
    ...
    block   of which kind says that it is the last: nothing may follow

Sizes are LEB128. A block's checksum is of the checksum before it (of the head, for the first), of whether it is the last, and of the bytes that were
compressed: blocks that are lost, repeated or exchanged are noticed, and an end that was none. Its CRC-32 is of all of that, of the block's own head and of the stream, so that damage is noticed before anything is
decoded. Everything a file says is compared with what can be, before anything is allocated by it.
"""

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from transformer_xl.errors import DataError

MAGIC = b"\xd7TXL"
VERSION = 2
BLOCK = 1 << 20
"""Bytes of text that are coded at a time."""
MOST_LANES = 64
MOST_STORED = 1 << 62
PIECE = 1 << 20
LAST, CODED = 1, 2
CHECKSUM = 8


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Head:
    fingerprint: bytes
    """Of the model."""
    lanes: int

    def to_bytes(self) -> bytes:
        return MAGIC + bytes([VERSION]) + self.fingerprint + bytes([self.lanes])


@dataclass(frozen=True, kw_only=True)
class Block:
    size: int
    stream: bytes | None
    """None for bytes that are stored, which follow."""
    checksum: bytes
    last: bool

    def head(self, before: bytes) -> bytes:
        kind = LAST * self.last | CODED * (self.stream is not None)
        told = bytes([kind]) + _varint(self.size)
        told += b"" if self.stream is None else _varint(len(self.stream))
        told += self.checksum
        return told + _crc(before, told, self.stream or b"").to_bytes(4, "little")


def checksum_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:CHECKSUM]


class TextChecksum:
    """Of a block's text, as it comes in pieces."""

    def __init__(self, before: bytes, *, last: bool) -> None:
        self._digest = hashlib.sha256(before + bytes([last]))

    def add(self, data: bytes) -> "TextChecksum":
        self._digest.update(data)
        return self

    def value(self) -> bytes:
        return self._digest.digest()[:CHECKSUM]


def read_head(source: Readable, *, name: str) -> Head:
    told = read_exactly(source, len(MAGIC) + 1, name=name, short=f"{name} is no file that txl compress wrote")
    if told[: len(MAGIC)] != MAGIC:
        raise DataError(f"{name} is no file that txl compress wrote")
    if told[-1] != VERSION:
        raise DataError(
            f"{name} has format {told[-1]}, and this version reads {VERSION}; install the one that wrote it"
        )
    rest = read_exactly(source, CHECKSUM + 1, name=name)
    if not 1 <= rest[-1] <= MOST_LANES:
        raise DataError(f"{name} is damaged: it names {rest[-1]} lanes, and there are 1 to {MOST_LANES}")
    return Head(fingerprint=rest[:-1], lanes=rest[-1])


def read_blocks(source: Readable, head: Head, *, name: str) -> Iterator[Block]:
    """Each is whole by its CRC. Who is given a stored one reads its bytes before asking for the next."""
    before, last = checksum_of(head.to_bytes()), False
    while not last:
        (kind,) = read_exactly(source, 1, name=name)
        last, coded = bool(kind & LAST), bool(kind & CODED)
        if kind & ~(LAST | CODED):
            raise DataError(f"{name} is damaged: it has a block of kind {kind}, which does not exist")
        size, told = _read_varint(source, bytes([kind]), name=name)
        length = 0
        if coded:
            length, told = _read_varint(source, told, name=name)
            if not 1 <= size <= BLOCK or length > size:
                raise DataError(
                    f"{name} is damaged: it has a block of {size:,} bytes coded as {length:,}, which cannot be"
                )
        elif size > MOST_STORED:
            raise DataError(f"{name} is damaged: it has a block of {size:,} bytes, which cannot be")
        found = read_exactly(source, CHECKSUM, name=name)
        crc = int.from_bytes(read_exactly(source, 4, name=name), "little")
        stream = read_exactly(source, length, name=name)
        if crc != _crc(before, told + found, stream):
            raise DataError(f"{name} is damaged: a block is not as it was written; nothing was taken from it")
        yield Block(size=size, stream=stream if coded else None, checksum=found, last=last)
        before = found
    if source.read(1):
        raise DataError(f"{name} goes on behind its end; it is damaged, or something was written after it")


def read_exactly(source: Readable, size: int, *, name: str, short: str = "") -> bytes:
    """A pipe gives what it has."""
    parts, missing = list[bytes](), size
    while missing:
        part = source.read(min(missing, PIECE))
        if not part:
            raise DataError(short or f"{name} ends too early: it was cut off")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _crc(before: bytes, told: bytes, stream: bytes) -> int:
    return zlib.crc32(stream, zlib.crc32(told, zlib.crc32(before)))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _read_varint(source: Readable, told: bytes, *, name: str) -> tuple[int, bytes]:
    """And all that was told so far."""
    value = 0
    for shift in range(0, 63, 7):
        (byte,) = read_exactly(source, 1, name=name)
        told += bytes([byte])
        value |= (byte & 127) << shift
        if byte < 128:
            # A size has one way to be written.
            if shift and not byte:
                break
            return value, told
    raise DataError(f"{name} is damaged: a size in it is none")
