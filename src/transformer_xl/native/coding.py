"""The door to the coder (`coding.cpp`): bytes and what a model expects in, a stream out, and back. Whole numbers only."""

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import numpy as np
from numpy.typing import NDArray

from transformer_xl.errors import InputError
from transformer_xl.native.doors import library

MOST_LANES = 64
ROOM = 16
"""Bytes that one byte becomes at most: each of its bits costs 16 at most."""

Frequencies = NDArray[np.uint32]
Bytes = NDArray[np.uint8]


class Coder:
    """What was counted in a text so far, and the stream that its bytes go to or come from. Lanes take turns, and share what is counted.

    `begin` a stream; then `encode` all of it and `finish`, or `decode` it byte by byte. What is counted stays for the next stream.
    """

    def __init__(self, *, lanes: int, values: bytes) -> None:
        """`values`: the byte that each token of the model is."""
        if not 1 <= lanes <= MOST_LANES:
            raise InputError(f"a coder of {lanes} lanes cannot be; there are 1 to {MOST_LANES}")
        if not 1 <= len(set(values)) == len(values):
            raise InputError("a coder needs tokens that are each another byte")
        self.lanes = lanes
        self._values = np.frombuffer(values, dtype=np.uint8)
        # Zeros that nobody has touched take no memory: a short text needs a few of these 70 MB.
        self._state = np.zeros(_there().coding_state_bytes(), dtype=np.uint8)
        self._stream = np.zeros(0, dtype=np.uint8)
        _there().coding_start(self._state.ctypes.data, lanes)

    def begin(self, stream: bytes = b"") -> None:
        """`stream`: what is to be decoded."""
        self._stream = np.frombuffer(stream, dtype=np.uint8)
        _there().coding_begin(self._state.ctypes.data, self._stream.ctypes.data, len(stream))

    def encode(self, frequencies_BTV: Frequencies, bytes_BT: Bytes, length_B: NDArray[np.int64]) -> bytes:
        """Of lane b the first `length_B[b]` bytes; what is certain of the stream by then."""
        B, T = self.lanes, bytes_BT.shape[1]
        out = np.empty(ROOM * B * T + 8, dtype=np.uint8)
        written = _there().coding_encode(
            self._state.ctypes.data,
            _place("frequencies", frequencies_BTV, np.uint32, (B, T, len(self._values))),
            len(self._values),
            self._values.ctypes.data,
            _place("bytes", bytes_BT, np.uint8, (B, T)),
            T,
            _place("lengths", length_B, np.int64, (B,)),
            out.ctypes.data,
        )
        return out[:written].tobytes()

    def finish(self) -> bytes:
        out = np.empty(8, dtype=np.uint8)
        return out[: _there().coding_finish(self._state.ctypes.data, out.ctypes.data)].tobytes()

    def decode(self, frequencies_BV: Frequencies, has_B: NDArray[np.bool_]) -> Bytes:
        """The next byte of each lane that has one, and 0 for the others. A stream that ends too early goes on with zeros."""
        out_B = np.zeros(self.lanes, dtype=np.uint8)
        _there().coding_decode(
            self._state.ctypes.data,
            _place("frequencies", frequencies_BV, np.uint32, (self.lanes, len(self._values))),
            len(self._values),
            self._values.ctypes.data,
            _place("lanes", has_B, np.bool_, (self.lanes,)),
            self._stream.ctypes.data,
            len(self._stream),
            out_B.ctypes.data,
        )
        return out_B


def _place(name: str, array: NDArray[np.generic], dtype: type, shape: tuple[int, ...]) -> int:
    """Where the array lies, once it is what the coder will take it for."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise InputError(
            f"the coder was given {name} as {array.dtype} {list(array.shape)}, where it takes {np.dtype(dtype)} {list(shape)}, contiguous"
        )
    return array.ctypes.data


@cache
def _there() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise InputError(
            "compressing needs the compiled kernels, which cannot be had here; install g++, or a wheel that brings them"
        )
    found.coding_state_bytes.restype = c_int64
    found.coding_most_lanes.restype = c_int
    found.coding_start.argtypes, found.coding_start.restype = [c_void_p, c_int64], None
    found.coding_begin.argtypes, found.coding_begin.restype = [c_void_p, c_void_p, c_int64], None
    found.coding_encode.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
    found.coding_encode.restype = c_int64
    found.coding_finish.argtypes, found.coding_finish.restype = [c_void_p, c_void_p], c_int64
    found.coding_decode.argtypes = [
        *(c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p),
    ]
    found.coding_decode.restype = None
    assert found.coding_most_lanes() == MOST_LANES
    return found
