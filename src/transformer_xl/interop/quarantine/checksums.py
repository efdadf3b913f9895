"""CRC-32C, which TensorFlow checks its files with and Python does not have: byte by byte for little, many rows side by side for much.

A long piece is cut into rows that are summed together, one column of eight bytes after another; the rows' sums are then joined two by two, each
time moving the left one over the zeros that the right one's length stands for.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

POLYNOMIAL = 0x82F63B78
ROWS = 4096
SHORTEST_FOR_ROWS = ROWS * 64
Words = NDArray[np.uint32]


def crc32c(data: bytes, before: int = 0) -> int:
    """The checksum of `data`, going on from the one of what came before it."""
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
    pairs = np.ascontiguousarray(
        rows.view("<u2").T
    )  # a column of all rows lies together, four of them make eight bytes
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
