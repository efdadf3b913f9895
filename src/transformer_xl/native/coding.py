"""The door to the coder (`coding.cpp`): tokens and what a model expects in, a stream out, and back. Whole numbers only."""

import ctypes
from collections.abc import Sequence
from ctypes import Structure, byref, c_int, c_int64, c_void_p
from functools import cache

import numpy as np
from numpy.typing import NDArray

from transformer_xl.errors import InputError
from transformer_xl.native.doors import library

MOST_LANES = 64
MOST_WORDS = (1 << 16) + 256
ROOM = 18
"""Bytes that one byte becomes at most: each of its bits costs 16 at most, and so does being told that no token ends before it."""

Frequencies = NDArray[np.uint32]
Tokens = NDArray[np.int64]


class _Words(Structure):
    """As `coding.cpp` has it."""

    _fields_ = [("count", c_int64), ("number", c_void_p), ("begin", c_void_p), ("bytes", c_void_p)]


class Coder:
    """What was counted in a text so far, and the stream that its tokens go to or come from. Lanes take turns, and share what is counted.

    `begin` a stream; then `encode` all of it and `finish`, or `decode` it token by token. What is counted stays for the next stream.
    """

    def __init__(self, *, lanes: int, words: Sequence[bytes]) -> None:
        """`words`: the bytes of each token. The model knows the first of them, as many as it gives frequencies for; the others are unlikely."""
        if not 1 <= lanes <= MOST_LANES:
            raise InputError(f"a coder of {lanes} lanes cannot be; there are 1 to {MOST_LANES}")
        if not 1 <= len(words) <= MOST_WORDS:
            raise InputError(f"a coder of {len(words):,} tokens cannot be; there are 1 to {MOST_WORDS:,}")
        if not all(words) or len(set(words)) != len(words):
            raise InputError("a coder needs tokens that are each other bytes")
        self.lanes, self.words = lanes, len(words)
        self._number = np.array(sorted(range(len(words)), key=words.__getitem__), dtype=np.int64)
        self._rank = np.argsort(self._number)
        ordered = [words[number] for number in self._number]
        self._length_of = np.array([len(word) for word in words], dtype=np.int64)
        self._begin = np.concatenate([[0], np.cumsum([len(word) for word in ordered])]).astype(np.int64)
        self._bytes = np.frombuffer(b"".join(ordered), dtype=np.uint8)
        places = (array.ctypes.data for array in (self._number, self._begin, self._bytes))
        self._words = _Words(len(words), *places)
        # Zeros that nobody has touched take no memory: a short text needs a few of these 75 MB.
        self._state = np.zeros(_there().coding_state_bytes(), dtype=np.uint8)
        self._stream = np.zeros(0, dtype=np.uint8)
        _there().coding_start(self._state.ctypes.data, lanes)

    def begin(self, stream: bytes = b"") -> None:
        """`stream`: what is to be decoded."""
        self._stream = np.frombuffer(stream, dtype=np.uint8)
        _there().coding_begin(self._state.ctypes.data, self._stream.ctypes.data, len(stream))

    def encode(self, frequencies_BTV: Frequencies, tokens_BT: Tokens, length_B: NDArray[np.int64]) -> bytes:
        """Of lane b the first `length_B[b]` tokens; what is certain of the stream by then."""
        B, T, V = self.lanes, tokens_BT.shape[1], self._known(frequencies_BTV)
        place = _place("tokens", tokens_BT, np.int64, (B, T))
        if tokens_BT.size and not 0 <= tokens_BT.min() <= tokens_BT.max() < self.words:
            raise InputError(f"the coder was given a token that is none of its {self.words:,}")
        out = np.empty(ROOM * int(self._length_of[tokens_BT].sum()) + 8, dtype=np.uint8)
        written = _there().coding_encode(
            self._state.ctypes.data,
            _place("frequencies", frequencies_BTV, np.uint32, (B, T, V)),
            V,
            byref(self._words),
            self._rank.ctypes.data,
            place,
            T,
            _place("lengths", length_B, np.int64, (B,)),
            out.ctypes.data,
        )
        return out[:written].tobytes()

    def finish(self) -> bytes:
        out = np.empty(8, dtype=np.uint8)
        return out[: _there().coding_finish(self._state.ctypes.data, out.ctypes.data)].tobytes()

    def decode(self, frequencies_BV: Frequencies, has_B: NDArray[np.bool_]) -> Tokens:
        """The next token of each lane that has one, and 0 for the others. A stream that ends too early goes on with zeros."""
        out_B, V = np.zeros(self.lanes, dtype=np.int64), self._known(frequencies_BV)
        _there().coding_decode(
            self._state.ctypes.data,
            _place("frequencies", frequencies_BV, np.uint32, (self.lanes, V)),
            V,
            byref(self._words),
            _place("lanes", has_B, np.bool_, (self.lanes,)),
            self._stream.ctypes.data,
            len(self._stream),
            out_B.ctypes.data,
        )
        return out_B

    def is_whole(self) -> bool:
        """Whether what was decoded ends where the stream does, which is as `finish` writes it: other ends can mean the same."""
        taken = _there().coding_taken(self._state.ctypes.data)
        return not self.is_over() and self._stream[taken:].tobytes() == self.finish()

    def is_over(self) -> bool:
        """Whether more was decoded than there is."""
        return bool(_there().coding_taken(self._state.ctypes.data) > len(self._stream))

    def _known(self, frequencies: Frequencies) -> int:
        """How many tokens the model knows."""
        if frequencies.ndim == 0 or frequencies.shape[-1] > self.words:
            raise InputError(
                f"the coder was given frequencies of {list(frequencies.shape)}, where it has {self.words:,} tokens"
            )
        return int(frequencies.shape[-1])


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
    found.coding_most_words.restype = c_int64
    found.coding_start.argtypes, found.coding_start.restype = [c_void_p, c_int64], None
    found.coding_begin.argtypes, found.coding_begin.restype = [c_void_p, c_void_p, c_int64], None
    found.coding_encode.argtypes = [c_void_p, c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_void_p, c_void_p]
    found.coding_encode.restype = c_int64
    found.coding_finish.argtypes, found.coding_finish.restype = [c_void_p, c_void_p], c_int64
    found.coding_taken.argtypes, found.coding_taken.restype = [c_void_p], c_int64
    found.coding_decode.argtypes = [c_void_p, c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_void_p]
    found.coding_decode.restype = None
    assert found.coding_most_lanes() == MOST_LANES
    assert found.coding_most_words() == MOST_WORDS
    return found
