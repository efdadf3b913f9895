"""What torch.save wrote, read without torch: the pickle's value, and where in the file each storage lies. Nothing is copied or allocated yet.

zip     archive/data.pkl, archive/data/0, archive/data/1, ...            (since torch 1.6; stored, never compressed)
legacy  magic, protocol, system, value, storage keys, storages           (five pickles, then each storage with its length)
"""

import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from transformer_xl.errors import ImportRefused
from transformer_xl.interop.quarantine.pickles import read_pickle
from transformer_xl.interop.quarantine.stand_ins import DTYPES, STORAGE_NAMES, Bytes, Name, Storage, TensorPlace

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MOST_ENTRIES = 100_000
LARGEST_PICKLE = 256 << 20
CHUNK = 1 << 20
LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True, kw_only=True)
class TorchFile:
    path: Path
    value: Any
    places: dict[str, tuple[int, int]]
    """Storage key -> where its bytes begin, and how many there are."""

    def bytes_of(self, tensor: TensorPlace) -> Bytes:
        storage, contiguous = tensor.storage, tensor.contiguous
        width = DTYPES[storage.dtype][1]
        begin, length = self.places[storage.key]
        skipped = (storage.start + tensor.offset) * width
        return Bytes(
            path=self.path,
            start=begin + skipped,
            dtype=storage.dtype,
            shape=tensor.shape,
            length=tensor.elements * width if contiguous else length - skipped,
            strides=None if contiguous else tensor.strides,
        )


def read_torch_file(path: Path) -> TorchFile:
    """Also a bare pickle, which has no storages."""
    with path.open("rb") as file:
        start = file.read(4)
        if not start:
            raise ImportRefused("the file is empty")
        if start == b"PK\x03\x04":
            return _read_zip(path, file)
        file.seek(0)
        return _read_pickles(path, file.read(LARGEST_PICKLE), size=path.stat().st_size)


# --- zip


def _read_zip(path: Path, file: IO[bytes]) -> TorchFile:
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, UnicodeDecodeError, struct.error):
        raise ImportRefused("the zip archive is cut short or damaged: it has no readable list of entries") from None
    _check_entries(entries, size)
    pickles = [entry for entry in entries if entry.filename.split("/")[1:] == ["data.pkl"]]
    if len(pickles) != 1:
        raise ImportRefused("the zip archive has no data.pkl; it is none that torch wrote")
    top = pickles[0].filename.split("/")[0]
    named = {entry.filename: entry for entry in entries}
    order = named.get(f"{top}/byteorder")
    if order is not None and _content(file, order, size) != b"little":
        raise ImportRefused("its numbers are not little-endian")
    if pickles[0].file_size > LARGEST_PICKLE:
        raise ImportRefused(f"{pickles[0].filename} has {pickles[0].file_size:,} bytes, too many for a pickle")
    places: dict[str, tuple[int, int]] = {}

    def storage(reference: object) -> Storage:
        found = _storage(reference)
        if found.key not in places:
            entry = named.get(f"{top}/data/{found.key}")
            if entry is None:
                raise ImportRefused(f"storage {found.key} is not in the archive")
            places[found.key] = _checked_place(file, entry, size)
        _check_length(found, places[found.key][1])
        return found

    data = _content(file, pickles[0], size)
    value, end = read_pickle(data, persistent=storage)
    if end != len(data):
        raise ImportRefused("data.pkl goes on after its value")
    return TorchFile(path=path, value=value, places=places)


def _check_entries(entries: list[zipfile.ZipInfo], size: int) -> None:
    if len(entries) > MOST_ENTRIES:
        raise ImportRefused(f"the zip archive has {len(entries):,} entries, more than {MOST_ENTRIES:,}")
    names = [entry.filename for entry in entries]
    if len(set(names)) != len(names):
        raise ImportRefused("the zip archive has two entries of one name")
    for entry in entries:
        parts = entry.filename.split("/")
        if ".." in parts or "" in parts[:-1] or "\\" in entry.filename or len(parts) < 2 or len(entry.filename) > 512:
            raise ImportRefused(f"the zip archive has an entry {entry.filename[:80]!r}, which lies outside its folder")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise ImportRefused(f"{entry.filename} is compressed, which torch never does")
        if entry.flag_bits & 1:
            raise ImportRefused(f"{entry.filename} is encrypted")
    if sum(entry.file_size for entry in entries) > size:
        raise ImportRefused("the entries of the zip archive are larger than the file")


def _checked_place(file: IO[bytes], entry: zipfile.ZipInfo, size: int) -> tuple[int, int]:
    if not 0 <= entry.header_offset < size:
        raise ImportRefused(f"{entry.filename} does not begin inside the file")
    file.seek(entry.header_offset)
    header = file.read(LOCAL_HEADER.size)
    if len(header) != LOCAL_HEADER.size:
        raise ImportRefused(f"{entry.filename} begins past the end of the file")
    magic, name_bytes, extra_bytes = LOCAL_HEADER.unpack(header)
    start = entry.header_offset + LOCAL_HEADER.size + name_bytes + extra_bytes
    if magic != b"PK\x03\x04" or start + entry.file_size > size:
        raise ImportRefused(f"{entry.filename} is not where the archive says it is")
    file.seek(start)
    found, left = 0, entry.file_size
    while left:
        if not (piece := file.read(min(CHUNK, left))):
            raise ImportRefused(f"{entry.filename} is cut short")
        found, left = zlib.crc32(piece, found), left - len(piece)
    if found != entry.CRC:
        raise ImportRefused(f"{entry.filename} is damaged: its checksum is another")
    return start, entry.file_size


def _content(file: IO[bytes], entry: zipfile.ZipInfo, size: int) -> bytes:
    start, length = _checked_place(file, entry, size)
    file.seek(start)
    return file.read(length)


# --- five pickles, or one


def _read_pickles(path: Path, data: bytes, *, size: int) -> TorchFile:
    first, position = read_pickle(data)
    if first != LEGACY_MAGIC:
        if position != size:
            raise ImportRefused("it is no file that torch wrote, and no single pickle")
        return TorchFile(path=path, value=first, places={})
    protocol, position = read_pickle(data, position)
    system, position = read_pickle(data, position)
    if protocol != LEGACY_PROTOCOL or not isinstance(system, dict):
        raise ImportRefused("its header is none that torch wrote")
    if system.get("little_endian") is not True:
        raise ImportRefused("its numbers are not little-endian")
    seen: dict[str, Storage] = {}

    def reference(value: object) -> object:
        if isinstance(value, tuple) and len(value) == 4 and value[0] == "module":
            if not isinstance(value[1], Name):
                raise ImportRefused("it holds the source of something that is no class")
            return value[1]
        found = _storage(value)
        if seen.setdefault(found.key, found).dtype != found.dtype:
            raise ImportRefused(f"storage {found.key} is declared with two types")
        return found

    value, position = read_pickle(data, position, persistent=reference)
    keys, position = read_pickle(data, position)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise ImportRefused("its list of storages is damaged")
    places: dict[str, tuple[int, int]] = {}
    with path.open("rb") as file:
        for key in keys:
            if key not in seen:
                raise ImportRefused(f"storage {key} belongs to no tensor")
            file.seek(position)
            length = file.read(8)
            elements = int.from_bytes(length, "little", signed=True)
            bytes_here = elements * DTYPES[seen[key].dtype][1]
            if len(length) != 8 or elements < 0 or position + 8 + bytes_here > size:
                raise ImportRefused(f"storage {key} is cut short")
            places[key] = (position + 8, bytes_here)
            position += 8 + bytes_here
    for key, storage in seen.items():
        if key not in places:
            raise ImportRefused(f"storage {key} is not in the file")
        _check_length(storage, places[key][1])
    return TorchFile(path=path, value=value, places=places)


# --- references


def _storage(reference: object) -> Storage:
    """("storage", type, key, device, elements), and in old files a sixth: which part of another storage it is. The device is nobody's business."""
    if not isinstance(reference, tuple) or len(reference) not in (5, 6) or reference[0] != "storage":
        raise ImportRefused("it refers to something that is no storage")
    kind, key, elements = reference[1], reference[2], reference[4]
    if not isinstance(kind, Name) or kind.text not in STORAGE_NAMES:
        raise ImportRefused("it has a storage of unknown type")
    if not isinstance(key, (str, int)) or type(elements) is not int or elements < 0:
        raise ImportRefused("it has a storage without a key or a length")
    start = 0
    if len(reference) == 6 and reference[5] is not None:
        view = reference[5]
        if not isinstance(view, tuple) or len(view) != 3 or any(type(n) is not int or n < 0 for n in view[1:]):
            raise ImportRefused(f"storage {key} is a part of another, and does not say which")
        start, elements = view[1], view[2]
    return Storage(key=str(key), dtype=STORAGE_NAMES[kind.text], elements=elements, start=start)


def _check_length(storage: Storage, length: int) -> None:
    needed = (storage.start + storage.elements) * DTYPES[storage.dtype][1]
    if needed > length or (storage.start == 0 and needed != length):
        raise ImportRefused(f"storage {storage.key} declares {needed:,} bytes, and the file has {length:,} there")
