"""TensorFlow's checkpoints, read without TensorFlow: model.ckpt.index says which variable lies where in model.ckpt.data-00000-of-00001.

    index   a sorted table as in LevelDB: blocks of (shared, new, value length, key rest, value), a block of blocks, a footer
    value   a protocol buffer: type, shape, shard, offset, size, checksum

Every length is checked against the bytes that are there, every block and every tensor against its CRC-32C.
"""

import re
from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from transformer_xl.errors import ImportRefused
from transformer_xl.interop.quarantine.stand_ins import DTYPES, Bytes

FOOTER = 48
TABLE_MAGIC = 0xDB4775248B80FB57
LARGEST_INDEX = 64 << 20
MOST_VARIABLES = 100_000
TYPES = {
    **{1: "float32", 2: "float64", 14: "bfloat16", 19: "float16"},
    **{3: "int32", 4: "uint8", 6: "int8", 9: "int64", 10: "bool"},
}
CHECKED_AT_ONCE = 64 << 20
POLYNOMIAL = 0x82F63B78
ROWS = 4096
SHORTEST_FOR_ROWS = ROWS * 64
Words = NDArray[np.uint32]


def read_bundle(index: Path) -> dict[str, Bytes]:
    """Every numeric variable by name; text, which TensorFlow also keeps there, is left out."""
    if index.stat().st_size > LARGEST_INDEX:
        raise ImportRefused(f"an index of {index.stat().st_size:,} bytes is larger than any checkpoint's")
    entries = dict(_table(index.read_bytes()))
    header = _fields(entries.pop(b"", b""))
    shards = _number(header, 1)
    if not 1 <= shards <= 1000 or _number(header, 2) != 0:
        raise ImportRefused("the index has no header, or its numbers are not little-endian")
    prefix = str(index).removesuffix(".index")
    paths = [Path(f"{prefix}.data-{shard:05d}-of-{shards:05d}") for shard in range(shards)]
    for path in paths:
        if not path.is_file():
            raise ImportRefused(f"{path.name} is missing beside it")
    sizes = [path.stat().st_size for path in paths]
    found = {}
    for key, value in entries.items():
        if not re.fullmatch(rb"[\x21-\x7e]{1,400}", key):
            raise ImportRefused("a variable of it has a name that is no name")
        name, fields = key.decode("ascii"), _fields(value)
        dtype = TYPES.get(_number(fields, 1))
        if dtype is None:
            continue
        if 7 in fields:
            raise ImportRefused(f"{name} is stored in slices, which the authors' checkpoints are not")
        shape = _shape(fields)
        shard, offset, size = (_number(fields, number) for number in (3, 4, 5))
        needed = DTYPES[dtype][1] * prod(shape)
        if shard >= shards or size != needed or offset + size > sizes[shard]:
            raise ImportRefused(f"{name} does not lie inside {paths[min(shard, shards - 1)].name}, or has another size")
        found[name] = Bytes(path=paths[shard], start=offset, dtype=dtype, shape=shape, length=size)
        _check_tensor(name, found[name], _number(fields, 6))
    if sum(tensor.length for tensor in found.values()) > sum(sizes):
        raise ImportRefused("its variables overlap")
    return dict(sorted(found.items(), key=lambda item: (str(item[1].path), item[1].start)))


# --- the table


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(data) < FOOTER or int.from_bytes(data[-8:], "little") != TABLE_MAGIC:
        raise ImportRefused("it is no TensorFlow index: its last bytes are others")
    position = len(data) - FOOTER
    _, position = _varint(data, position)
    _, position = _varint(data, position)
    offset, position = _varint(data, position)
    size, _ = _varint(data, position)
    count = 0
    last: bytes | None = None
    for _, handle in _block(data, offset, size):
        inner_offset, place = _varint(handle, 0)
        inner_size, _ = _varint(handle, place)
        for key, value in _block(data, inner_offset, inner_size):
            count += 1
            if count > MOST_VARIABLES or (last is not None and key <= last):
                raise ImportRefused("its keys are too many or not in order")
            last = key
            yield key, value


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys share their beginnings with the key before; the block ends with a list of places where they do not."""
    if offset + size + 5 > len(data) - FOOTER:
        raise ImportRefused("a block of the index reaches past its end")
    if data[offset + size] != 0:
        raise ImportRefused("a block of the index is compressed, which the authors' checkpoints are not")
    stored = int.from_bytes(data[offset + size + 1 : offset + size + 5], "little")
    if _unmasked(stored) != _crc32c(data[offset : offset + size + 1]):
        raise ImportRefused("a block of the index is damaged: its checksum is another")
    block = data[offset : offset + size]
    if size < 4:
        raise ImportRefused("a block of the index is too short")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")
    if end < 0:
        raise ImportRefused("a block of the index is damaged")
    position, key = 0, b""
    while position < end:
        shared, position = _varint(block, position)
        new, position = _varint(block, position)
        length, position = _varint(block, position)
        if shared > len(key) or position + new + length > end:
            raise ImportRefused("an entry of the index reaches past its block")
        key = key[:shared] + block[position : position + new]
        position += new
        yield key, block[position : position + length]
        position += length


# --- protocol buffers


def _fields(data: bytes) -> dict[int, list[int | bytes]]:
    found: dict[int, list[int | bytes]] = {}
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value, position = _varint(data, position)
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            value = int.from_bytes(data[position : position + width], "little")
            position += width
        elif kind == 2:
            length, position = _varint(data, position)
            value = data[position : position + length]
            position += length
        else:
            raise ImportRefused("an entry of the index has a field of unknown kind")
        if position > len(data):
            raise ImportRefused("an entry of the index is cut short")
        found.setdefault(tag >> 3, []).append(value)
    return found


def _number(fields: dict[int, list[int | bytes]], number: int) -> int:
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise ImportRefused("an entry of the index has text where a number belongs")
    return value


def _shape(fields: dict[int, list[int | bytes]]) -> tuple[int, ...]:
    dimensions = [item for shape in fields.get(2, []) for item in _fields(_text(shape)).get(2, [])]
    sizes = [_number(_fields(_text(dimension)), 1) for dimension in dimensions]
    if len(sizes) > 8 or any(size > 1 << 40 for size in sizes):
        raise ImportRefused("a variable of it has a shape that no checkpoint has")
    return tuple(sizes)


def _text(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ImportRefused("an entry of the index has a number where a table belongs")
    return value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            raise ImportRefused("the index is cut short")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ImportRefused("the index holds a number of more than 64 bits")


# --- checksums


def _check_tensor(name: str, tensor: Bytes, stored: int) -> None:
    found, left = 0, tensor.length
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        while left:
            if not (piece := file.read(min(CHECKED_AT_ONCE, left))):
                raise ImportRefused(f"{tensor.path.name} became shorter while it was read")
            found, left = _crc32c(piece, found), left - len(piece)
    if _unmasked(stored) != found:
        raise ImportRefused(f"{name} is damaged: its checksum is another")


def _unmasked(stored: int) -> int:
    """TensorFlow stores a checksum turned and shifted, so that a checksum of checksums is no special case."""
    turned = (stored - 0xA282EAD8) & 0xFFFFFFFF
    return ((turned << 15) | (turned >> 17)) & 0xFFFFFFFF


def _crc32c(data: bytes, before: int = 0) -> int:
    """The checksum of `data`, going on from the one of what came before it; Python has none of its own.

    Little is summed byte by byte. Much is cut into rows that are summed together, one column of eight bytes after another; the rows' sums are then
    joined two by two, each time moving the left one over the zeros that the right one's length stands for.
    """
    columns = len(data) // ROWS // 8 * 8
    crc = before ^ 0xFFFFFFFF
    rest = data
    if len(data) >= SHORTEST_FOR_ROWS:
        crc = _many(np.frombuffer(data, dtype=np.uint8, count=columns * ROWS).reshape(ROWS, columns), crc)
        rest = data[columns * ROWS :]
    table = _tables()[0].tolist()
    for byte in rest:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _many(rows: NDArray[np.uint8], start: int) -> int:
    by_pairs = _pair_tables()
    crc = np.zeros(len(rows), dtype=np.uint32)
    crc[0] = start
    # A column of all rows lies together, and four of them make eight bytes.
    pairs = np.ascontiguousarray(rows.view("<u2").T)
    for column in range(0, len(pairs), 4):
        first = by_pairs[3].take(pairs[column] ^ crc.astype(np.uint16))
        second = by_pairs[2].take(pairs[column + 1] ^ (crc >> np.uint32(16)).astype(np.uint16))
        crc = first ^ second ^ by_pairs[1].take(pairs[column + 2]) ^ by_pairs[0].take(pairs[column + 3])
    shift = _zeros(rows.shape[1])
    while len(crc) > 1:
        crc = _times(shift, crc[0::2]) ^ crc[1::2]
        shift = _times(shift, shift)
    return int(crc[0])


@cache
def _tables() -> Words:
    """[8, 256]: what a byte adds when 0 to 7 further bytes follow it."""
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ np.uint32(POLYNOMIAL), crc >> 1).astype(np.uint32)
    tables = [crc]
    for _ in range(7):
        tables.append(tables[0][tables[-1] & 0xFF] ^ (tables[-1] >> 8))
    return np.stack(tables)


@cache
def _pair_tables() -> Words:
    """[4, 65536]: the same for two bytes, when 0, 2, 4 or 6 further bytes follow them."""
    low, high = np.arange(65536) & 0xFF, np.arange(65536) >> 8
    tables = _tables()
    return np.stack([tables[2 * n + 1][low] ^ tables[2 * n][high] for n in range(4)])


def _zeros(count: int) -> Words:
    """What `count` bytes of zeros do to a checksum: the images of its 32 bits."""
    result = np.uint32(1) << np.arange(32, dtype=np.uint32)
    one = _tables()[0][result & 0xFF] ^ (result >> 8)
    while count:
        if count & 1:
            result = _times(one, result)
        one = _times(one, one)
        count >>= 1
    return result


def _times(matrix: Words, vectors: Words) -> Words:
    result = np.zeros_like(vectors)
    for bit in range(32):
        result ^= np.where((vectors >> np.uint32(bit)) & 1, matrix[bit], np.uint32(0)).astype(np.uint32)
    return result
