"""Bytes out of a file, plain or compressed, or out of a member of an archive, never more than a stated number of them. Knows no corpora.

What a file is, is told by its first bytes, never by its name. Whatever it makes of the readers, it leaves here as a DataError naming the file.
"""

import bz2
import gzip
import io
import lzma
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from transformer_xl.errors import DataError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK = 1 << 20
MAGIC = {b"\x1f\x8b": "gz", b"\xfd7zXZ\x00": "xz", b"BZh": "bz2", b"PK\x03\x04": "zip", b"PK\x05\x06": "zip"}
MAGIC |= {b"\x28\xb5\x2f\xfd": "zst", **{bytes([0x50 + n]) + b"\x2a\x4d\x18": "zst" for n in range(16)}}
"""The sixteen are frames that hold no text; some compressors begin with one."""
MOST_FOLD = 100
"""What is compressed may become so many times as large: text is squeezed tenfold at best, a bomb a thousandfold."""
ALWAYS_ALLOWED = 64 << 20
"""Bytes that any file may become, however small it is."""
XZ_MEMORY = 256 << 20
"""What the decoder may take. `xz -9` needs a quarter of it; a header of a few bytes could ask for four gigabytes."""
ZSTD_WINDOW_BITS = 27
"""The same for zstd: what `zstd --ultra` and `--long` take; `--long=31` would be two gigabytes."""
ZIP_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2}
"""Those whose decoders are small; the dictionary of ZIP_LZMA is as large as the file says."""
LONGEST_TAR_HEADER = 1 << 20
TAR_HEADERS = {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, b"x", b"g", b"X"}
"""What precedes a member to tell more of it; the last three are POSIX's and Solaris's."""

Advance = Callable[[float], None]


def most_unpacked(disk_bytes: int) -> int:
    """What a compressed file of so many bytes may become where nothing else is known of it."""
    return max(ALWAYS_ALLOWED, MOST_FOLD * disk_bytes)


def damaged(name: str, error: Exception) -> DataError:
    return DataError(f"{name} is damaged or cut short ({str(error)[:200] or type(error).__name__}); fetch it again")


def too_large(name: str, most: int) -> DataError:
    return DataError(
        f"{name} becomes more than {most:,} bytes, which no text of its size does; if you mean it, unpack it and give what is inside"
    )


@contextmanager
def said(name: str) -> Iterator[None]:
    """For nothing but the standard library's readers: what they raise on damage, which is nearly anything, becomes a sentence."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        if error.errno is None:  # bz2 and gzip say so of damage
            raise damaged(name, error) from error
        raise DataError(f"{name} cannot be read: {error.strerror}") from error
    except Exception as error:
        raise damaged(name, error) from error


class Stream:
    """A reader that stops where there is more than there may be, having held one block at a time."""

    def __init__(self, stream: IO[bytes], *, name: str, most: int | None, refusal: DataError) -> None:
        self._stream, self._name, self._most, self._refusal = stream, name, most, refusal
        self._position = 0

    def read(self, size: int) -> bytes:
        with said(self._name):
            data = self._stream.read(size)
        self._position += len(data)
        if self._most is not None and self._position > self._most:
            raise self._refusal
        return data

    def seek(self, position: int) -> None:
        """Forwards only. What is compressed is read up to there."""
        with said(self._name):
            if self._stream.seekable():
                self._position = self._stream.seek(position)
        while self._position < position and self.read(min(BLOCK, position - self._position)):
            pass


class Counting(io.FileIO):
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


class Frames(io.RawIOBase):
    """An .xz or .zst file, one stream after another, whose decoder is held to its memory and to the room it is given: the libraries' own files have no
    such limits, or end quietly where a file was cut short."""

    def __init__(self, file: IO[bytes], make_decoder: Callable[[], Any], *, padding: bytes = b"") -> None:
        self._file, self._make_decoder, self._padding = file, make_decoder, padding
        self._decoder = make_decoder()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            if self._decoder.eof:
                fed = self._next_stream()
                if not fed:
                    return 0
                self._decoder = self._make_decoder()
            else:
                fed = self._file.read(BLOCK) if self._decoder.needs_input else b""
                if self._decoder.needs_input and not fed:
                    raise EOFError("it ends before its end mark")
            data = self._decoder.decompress(fed, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _next_stream(self) -> bytes:
        rest: bytes = self._decoder.unused_data.lstrip(self._padding)
        while not rest and (block := self._file.read(BLOCK)):
            rest = block.lstrip(self._padding)
        return rest


def _xz_decoder() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY)


def _zstd_decoder() -> Any:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_BITS})


def decompressed(buffered: IO[bytes], kind: str) -> IO[bytes]:
    if kind == "gz":
        return gzip.GzipFile(fileobj=buffered)  # type: ignore[return-value]
    if kind == "xz":
        # Zeros may stand between streams.
        return io.BufferedReader(Frames(buffered, _xz_decoder, padding=b"\0"), BLOCK)
    if kind == "zst":
        return io.BufferedReader(Frames(buffered, _zstd_decoder), BLOCK)
    if kind == "bz2":
        return bz2.BZ2File(buffered)
    return buffered


def kind_of(path: Path) -> str:
    """gz, xz, bz2, zst, zip or plain, by the first bytes."""
    with said(str(path)), path.open("rb") as file:
        head = file.read(8)
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "plain")


def listed_zip(archive: zipfile.ZipFile, *, name: str, disk_bytes: int) -> list[zipfile.ZipInfo]:
    """The files of an archive that become, together, no more than a file of its size may: members can lie over each other."""
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    if sum(entry.file_size for entry in entries) > most_unpacked(disk_bytes):
        raise too_large(name, most_unpacked(disk_bytes))
    return entries


def opened_member(archive: zipfile.ZipFile, member: str, *, name: str) -> IO[bytes]:
    entry = archive.getinfo(member)
    if entry.flag_bits & 1:
        raise DataError(f"{name} is encrypted; unpack it with its password and give what is inside")
    if entry.compress_type not in ZIP_METHODS:
        raise DataError(
            f"{name} is compressed by method {entry.compress_type} of .zip, which is not read here; unpack it and give what is inside"
        )
    return archive.open(entry)


class TarMember(tarfile.TarInfo):
    """Refuses headers that are no headers: tarfile reads those of a long name whole, however long they say they are."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "TarMember":
        member = super().frombuf(buf, encoding, errors)
        if member.type in TAR_HEADERS and not 0 <= member.size <= LONGEST_TAR_HEADER:
            raise tarfile.ReadError(f"it has a header of {member.size:,} bytes")
        return member
