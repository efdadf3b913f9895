"""A block of text <-> a stream, by a model that reads many parts of it side by side, and by what was counted in all of them.

    tokens  abcdefghij      lane 0  \\n a b c d     each lane reads a part, the first token after a line end; all of them expect their next tokens, and
                            lane 1  \\n e f g h     these are coded in turns: a e i b f j c g d h
                            lane 2  \\n i j . .

The next block goes on with the same lanes, so that each has something behind it.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from transformer_xl.console import Advance
from transformer_xl.data.text.tokenizers import BytePairTokenizer, ByteTokenizer, Tokenizer
from transformer_xl.errors import InputError
from transformer_xl.inference.portable import PortableReader
from transformer_xl.model import AnyModel
from transformer_xl.native.coding import Coder

AT_ONCE = 32
"""Tokens of each lane that are read together, where they are known."""
MOST_EXPECTED = 1 << 22
"""Frequencies at a time."""
SLACK = 1024
"""A stream that is so much longer than what it holds is given up."""
COUNT = 3
"""Bytes of a stream that tell how many tokens several lanes share."""
START = b"\n"
LONGEST_WORD = 4096
"""Bytes: what one step of one lane gives at most."""


class TextCoder:
    def __init__(self, model: AnyModel, tokenizer: Tokenizer, *, lanes: int, threads: int | None = None) -> None:
        self._tokenizer, known = tokenizer, _words(tokenizer)
        self.lanes = lanes
        self._reader = PortableReader(model, lanes=lanes, threads=threads)
        # A byte that is no token is coded by what was counted, and read as if it were the first token.
        missing = {bytes([value]) for value in range(256)}.difference(known)
        self._words = [*known, *sorted(missing)]
        self._known = len(known)
        self._single = np.zeros(256, dtype=np.int64)
        for number, word in enumerate(self._words):
            if len(word) == 1:
                self._single[word[0]] = number
        self._at_once = max(1, min(AT_ONCE, MOST_EXPECTED // (lanes * self._known)))
        told = b"".join(len(word).to_bytes(4, "little") + word for word in known)
        self.fingerprint = hashlib.sha256(self._reader.fingerprint + told).digest()
        """Of everything that decides what a stream means."""
        self.reset()

    def reset(self) -> None:
        """As if nothing had been read."""
        self._reader.reset()
        self._coder = Coder(lanes=self.lanes, words=self._words)
        self._next_B = self._read_as(np.full(self.lanes, self._single[START[0]]))

    def encode(self, data: bytes, *, advance: Advance) -> bytes | None:
        """None where it would not be shorter: then everything was read for nothing, and a `reset` is due."""
        tokens = self._tokens(data)
        length_B, steps = self._parts(len(tokens))
        tokens_BT = np.zeros((self.lanes, steps), dtype=np.int64)
        tokens_BT.reshape(-1)[: len(tokens)] = tokens
        size_BT = np.array([len(word) for word in self._words])[tokens_BT]
        size_BT.reshape(-1)[len(tokens) :] = 0
        self._coder.begin()
        stream, taken = bytearray(len(tokens).to_bytes(COUNT, "little") if self.lanes > 1 else b""), 0
        for start in range(0, steps, self._at_once):
            some_BT = np.ascontiguousarray(tokens_BT[:, start : start + self._at_once])
            read_BT = self._read_as(some_BT)
            frequencies_BTV = self._reader.read_many(np.concatenate([self._next_B[:, None], read_BT[:, :-1]], axis=1))
            self._next_B = read_BT[:, -1]
            stream += self._coder.encode(np.ascontiguousarray(frequencies_BTV), some_BT, length_B - start)
            done = int(size_BT[:, start : start + self._at_once].sum())
            advance(done)
            taken += done
            if len(stream) > taken + SLACK:
                advance(len(data) - taken)
                return None
        stream += self._coder.finish()
        return bytes(stream) if len(stream) < len(data) else None

    def decode(self, stream: bytes, size: int, *, advance: Advance) -> bytes:
        """Of a stream that is damaged, some bytes or other, and not always so many; of one that nobody has written so, none."""
        count = size  # at most: one lane has as many tokens as it takes
        if self.lanes > 1:
            count, stream = min(int.from_bytes(stream[:COUNT], "little"), size), stream[COUNT:]
        length_B, steps = self._parts(count)
        self._coder.begin(stream)
        told, done = list[NDArray[np.int64]](), 0
        for step in range(steps):
            if done > size or (done == size and self.lanes == 1) or self._coder.is_over():
                break
            frequencies_BV = np.ascontiguousarray(self._reader.read(self._next_B))
            has_B = length_B > step
            told.append(self._coder.decode(frequencies_BV, has_B))
            self._next_B = self._read_as(told[-1])
            found = sum(len(self._words[token]) for token in told[-1][has_B])
            advance(min(found, max(0, size - done)))
            done += found
        tokens_TB = np.array(told).reshape(len(told), self.lanes)
        if not self._coder.is_whole():
            return b""
        lanes = ([self._words[token] for token in tokens_TB[:length, b]] for b, length in enumerate(length_B))
        return b"".join(word for lane in lanes for word in lane)

    def _tokens(self, data: bytes) -> NDArray[np.int64]:
        if isinstance(self._tokenizer, BytePairTokenizer):
            tokens = self._tokenizer.encode(data)
            if b"".join(self._words[token] for token in tokens) == data:
                return tokens
            # A file of byte pairs may mean what nobody thought of; single bytes always give the text back.
        return self._single[np.frombuffer(data, dtype=np.uint8)]

    def _read_as(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(tokens < self._known, tokens, 0)

    def _parts(self, count: int) -> tuple[NDArray[np.int64], int]:
        """How many tokens each lane reads, and the most of them."""
        steps = -(-count // self.lanes)
        return np.clip(count - steps * np.arange(self.lanes), 0, steps), steps


def _words(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token, where tokens give back any bytes."""
    if not isinstance(tokenizer, ByteTokenizer | BytePairTokenizer):
        raise InputError(
            f"compressing is for models of bytes or byte pairs, and this one has {tokenizer.kind} tokens; train one on a store made with `tokenizer=bpe`"
        )
    if tokenizer.lower:
        raise InputError(
            "this model's tokens are of lower-cased text, from which no file comes back; train one on a store made without `lower`"
        )
    words = [tokenizer.decode_bytes([number]) for number in range(tokenizer.size)]
    single = {word for word in words if len(word) == 1}
    if isinstance(tokenizer, BytePairTokenizer) and (len(single) < 256 or len(set(words)) < len(words) or b"" in words):
        raise InputError(
            "this model's byte pairs do not have every byte and each token once, so not every file has tokens; train one on a store made with `tokenizer=bpe`"
        )
    longest = max(map(len, words))
    if longest > LONGEST_WORD:
        raise InputError(
            f"this model has a token of {longest:,} bytes, and compressing takes none of more than {LONGEST_WORD:,}; train one on other text"
        )
    return words
