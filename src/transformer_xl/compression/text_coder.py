"""A block of text <-> a stream, by a model that reads many parts of it side by side, and by what was counted in all of them.

    block   abcdefghij      lane 0  \\n a b c d     each lane reads a part, the first byte after a line end; all of them expect their next bytes, and
                            lane 1  \\n e f g h     these are coded in turns: a e i b f j c g d h
                            lane 2  \\n i j . .

The next block goes on with the same lanes, so that each has something behind it.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from transformer_xl.console import Advance
from transformer_xl.data.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.errors import InputError
from transformer_xl.inference.portable import PortableReader
from transformer_xl.model import AnyModel
from transformer_xl.native.coding import Coder

AT_ONCE = 32
"""Bytes of each lane that are read together, where they are known."""
SLACK = 1024
"""A stream that is so much longer than what it holds is given up."""
START = ord("\n")


class TextCoder:
    def __init__(self, model: AnyModel, tokenizer: Tokenizer, *, lanes: int, threads: int | None = None) -> None:
        if not isinstance(tokenizer, ByteTokenizer):
            raise InputError(
                f"compressing is for models of bytes, and this one has {tokenizer.kind} tokens; train one on a store made with `tokenizer=byte`"
            )
        self.lanes = lanes
        self._reader = PortableReader(model, lanes=lanes, threads=threads)
        self._values = tokenizer.values.tobytes()
        # A byte that the model has no token for is coded by what was counted, and read as if it were the first byte that it has.
        self._token_of = np.zeros(256, dtype=np.int64)
        self._token_of[tokenizer.values] = np.arange(tokenizer.size)
        self.fingerprint = hashlib.sha256(self._reader.fingerprint + self._values).digest()
        """Of everything that decides what a stream means."""
        self.reset()

    def reset(self) -> None:
        """As if nothing had been read."""
        self._reader.reset()
        self._coder = Coder(lanes=self.lanes, values=self._values)
        self._next_B = np.full(self.lanes, self._token_of[START])

    def encode(self, data: bytes, *, advance: Advance) -> bytes | None:
        """None where it would not be shorter: then everything was read for nothing, and a `reset` is due."""
        length_B, steps = self._parts(len(data))
        bytes_BT = np.zeros((self.lanes, steps), dtype=np.uint8)
        bytes_BT.reshape(-1)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._coder.begin()
        stream, taken = bytearray(), 0
        for start in range(0, steps, AT_ONCE):
            some_BT = np.ascontiguousarray(bytes_BT[:, start : start + AT_ONCE])
            tokens_BT = self._token_of[some_BT]
            frequencies_BTV = self._reader.read_many(np.concatenate([self._next_B[:, None], tokens_BT[:, :-1]], axis=1))
            self._next_B = tokens_BT[:, -1]
            stream += self._coder.encode(np.ascontiguousarray(frequencies_BTV), some_BT, length_B - start)
            done = int(np.clip(length_B, 0, start + AT_ONCE).sum())
            advance(done - taken)
            taken = done
            if len(stream) > taken + SLACK:
                advance(len(data) - taken)
                return None
        stream += self._coder.finish()
        return bytes(stream) if len(stream) < len(data) else None

    def decode(self, stream: bytes, size: int, *, advance: Advance) -> bytes:
        """Of a stream that is damaged, some bytes or other."""
        length_B, steps = self._parts(size)
        bytes_BT = np.zeros((self.lanes, steps), dtype=np.uint8)
        self._coder.begin(stream)
        for step in range(steps):
            frequencies_BV = np.ascontiguousarray(self._reader.read(self._next_B))
            has_B = length_B > step
            bytes_BT[:, step] = self._coder.decode(frequencies_BV, has_B)
            self._next_B = self._token_of[bytes_BT[:, step]]
            advance(int(has_B.sum()))
        return bytes_BT.tobytes()[:size]

    def _parts(self, size: int) -> tuple[NDArray[np.int64], int]:
        """How many bytes each lane reads, and the most of them."""
        steps = -(-size // self.lanes)
        return np.clip(size - steps * np.arange(self.lanes), 0, steps), steps
