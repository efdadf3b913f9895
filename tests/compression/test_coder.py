"""The coder: the same stream as its slow twin, to the byte; every byte comes back; what is not what it takes is refused; the same on another machine."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from slow_coder import SlowCoder

from transformer_xl import native
from transformer_xl.errors import InputError
from transformer_xl.native.coding import MOST_LANES, Coder

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")
TEXT = Path(json.__file__).read_bytes()
EVERY = [bytes([value]) for value in range(256)]
PAIRS = [
    *EVERY[::-1],
    *(b"in", b"int", b"  ", b"    ", b"th", b"the", b"then", b"ret", b"return ", b"self", b"xyz", b"\xff\xff\xff"),
]
FEW = [*(bytes([value]) for value in b"\n abcdefghijklmnopqrstuvwxyz"), b"the", b"there"]
"""Of a model that does not know every byte."""


def frequencies(shape: tuple[int, ...], tokens: int, *, seed: int = 0) -> np.ndarray:
    """Of a model that is sure of something at most places, and wrong."""
    chance = np.random.default_rng(seed)
    odds = np.exp(chance.normal(size=(*shape, tokens)) * chance.choice([0.1, 2, 8], size=(*shape, 1)))
    whole = 1 + (odds / odds.sum(-1, keepdims=True) * ((1 << 24) - tokens)).astype(np.int64)
    whole[..., 0] += (1 << 24) - whole.sum(-1)
    return whole.astype(np.uint32)


def laid_out(data: bytes, lanes: int, words: list[bytes] = EVERY) -> tuple[np.ndarray, np.ndarray]:
    """In the longest words, lane after lane."""
    found = list[int]()
    while data:
        word = max((word for word in words if data.startswith(word)), key=len)
        found.append(words.index(word))
        data = data[len(word) :]
    steps = -(-len(found) // lanes)
    tokens_BT = np.zeros((lanes, steps), dtype=np.int64)
    tokens_BT.reshape(-1)[: len(found)] = found
    return tokens_BT, np.clip(len(found) - steps * np.arange(lanes), 0, steps)


def decoded(coder, stream: bytes, frequencies_BTV: np.ndarray, length_B: np.ndarray) -> np.ndarray:
    coder.begin(stream)
    B, T = frequencies_BTV.shape[:2]
    found_BT = np.zeros((B, T), dtype=np.int64)
    for step in range(T):
        found_BT[:, step] = coder.decode(np.ascontiguousarray(frequencies_BTV[:, step]), length_B > step)
    return found_BT


@pytest.mark.parametrize(
    ("data", "lanes", "words"),
    [
        (TEXT[:600], 1, EVERY),
        (TEXT[:301] + TEXT[100:300] + b"".join(EVERY), 3, EVERY),
        (bytes(200) + b"".join(EVERY) + b"ab" * 100, 2, EVERY[::-1]),
        (np.random.default_rng(1).bytes(400), 64, EVERY),
        (TEXT[:200] + b"".join(EVERY), 5, FEW),
        (TEXT[:900], 1, PAIRS),
        (TEXT[:700] + bytes(20) + b"\xff" * 40 + TEXT[200:700], 3, PAIRS),
    ],
    ids=["text", "lanes", "runs", "noise", "bytes without a token", "pairs", "pairs in lanes"],
)
def test_the_stream_is_that_of_the_slow_twin(data, lanes, words):
    every = [*words, *(byte for byte in EVERY if byte not in words)]
    tokens_BT, length_B = laid_out(data, lanes, every)
    frequencies_BTV = frequencies(tokens_BT.shape, len(words))
    streams = []
    for kind in (Coder, SlowCoder):
        coder = kind(lanes=lanes, words=every)
        coder.begin()
        # In pieces, and then a second stream with what was counted in the first.
        first = coder.encode(frequencies_BTV[:, :7].copy(), tokens_BT[:, :7].copy(), length_B)
        rest = coder.encode(frequencies_BTV[:, 7:].copy(), tokens_BT[:, 7:].copy(), length_B - 7)
        streams.append([first + rest + coder.finish()])
        coder.begin()
        again = coder.encode(frequencies_BTV[:, :9].copy(), tokens_BT[:, :9].copy(), length_B)
        streams[-1].append(again + coder.finish())
    assert streams[0] == streams[1]
    for kind in (Coder, SlowCoder):
        coder = kind(lanes=lanes, words=every)
        assert np.array_equal(decoded(coder, streams[0][0], frequencies_BTV, length_B), tokens_BT)
        assert np.array_equal(decoded(coder, streams[0][1], frequencies_BTV[:, :9], length_B), tokens_BT[:, :9])


def test_a_model_that_is_sure_of_long_tokens_pays_for_no_byte_of_them():
    words = [*EVERY, b"international", b"international "]
    tokens_BT = np.full((1, 400), 257)
    sure_V = np.ones(len(words), dtype=np.uint32)
    sure_V[257] = (1 << 24) - len(words) + 1
    coder = Coder(lanes=1, words=words)
    coder.begin()
    assert len(coder.encode(np.tile(sure_V, (1, 400, 1)), tokens_BT, np.array([400])) + coder.finish()) <= 4


def test_what_is_expected_costs_nothing_and_what_is_not_costs_at_most_sixteen_bytes():
    tokens_BT, length_B = np.full((1, 5000), ord("x")), np.array([5000])
    sure_V = np.ones(256, dtype=np.uint32)
    sure_V[ord("x")] = (1 << 24) - 255
    sizes = []
    for symbol in (ord("x"), ord("y")):
        frequencies_BTV = np.tile(np.roll(sure_V, symbol - ord("x")), (1, 5000, 1))
        coder = Coder(lanes=1, words=EVERY)
        coder.begin()
        sizes.append(len(coder.encode(frequencies_BTV, tokens_BT, length_B) + coder.finish()))
    assert sizes[0] <= 2
    assert sizes[1] < 60  # what is counted soon knows better than the model


def test_a_stream_that_ends_early_or_is_none_gives_some_bytes():
    frequencies_BTV = frequencies((2, 50), 256)
    for stream in (b"", b"\xff" * 3, bytes(100)):
        found = decoded(Coder(lanes=2, words=EVERY), stream, frequencies_BTV, np.array([50, 50]))
        assert found.shape == (2, 50)


def test_what_the_coder_does_not_take_is_refused():
    wrong = ({"lanes": 0}, {"lanes": MOST_LANES + 1}, {"words": []}, {"words": [b"a", b"a"]}, {"words": [b"a", b""]})
    for arguments in wrong:
        with pytest.raises(InputError, match="a coder"):
            Coder(**{"lanes": 2, "words": EVERY} | arguments)
    coder = Coder(lanes=2, words=EVERY)
    coder.begin()
    good, data, lengths = frequencies((2, 4), 256), np.zeros((2, 4), dtype=np.int64), np.array([4, 4])
    for given in (
        (good.astype(np.int64), data, lengths),
        (good[:, :3], data, lengths),
        (good[..., ::2], data, lengths),
        (good, data.astype(np.uint8), lengths),
        (good, data + 256, lengths),
        (good, data - 1, lengths),
        (np.concatenate([good, good], axis=2), data, lengths),
        (good, data, lengths[:1]),
        (good, data, lengths.astype(np.int32)),
    ):
        with pytest.raises(InputError, match="the coder was given"):
            coder.encode(*given)
    with pytest.raises(InputError, match="the coder was given"):
        coder.decode(good[:, 0], np.array([True, True]))  # not contiguous
    # Frequencies of nobody's harm nothing.
    coder.encode(np.full_like(good, 2**32 - 1), data, lengths)
    coder.encode(np.zeros_like(good), data, lengths)


PROGRAM = """
#include "coding.cpp"
#include <cstdio>
#include <vector>
int main() {
  int64_t sizes[5];
  if (fread(sizes, 8, 5, stdin) != 5) return 1;
  const int64_t lanes = sizes[0], steps = sizes[1], tokens = sizes[2], size = sizes[3], most = sizes[4];
  std::vector<uint32_t> frequencies(lanes * steps * tokens);
  std::vector<int64_t> number(tokens), rank(tokens), begin(tokens + 1), told(lanes * steps), lengths(lanes, steps);
  std::vector<uint8_t> bytes(size), out(most);
  const auto read = [](auto& into) { return fread(into.data(), sizeof(into[0]), into.size(), stdin) == into.size(); };
  if (!(read(frequencies) && read(number) && read(rank) && read(begin) && read(bytes) && read(told))) return 1;
  const Words words{tokens, number.data(), begin.data(), bytes.data()};
  static State state;
  coding_start(&state, lanes);
  coding_begin(&state, nullptr, 0);
  int64_t count = coding_encode(&state, frequencies.data(), tokens, &words, rank.data(), told.data(), steps, lengths.data(), out.data());
  count += coding_finish(&state, out.data() + count);
  fwrite(out.data(), 1, count, stdout);
}
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("compiler", "flags", "emulator"),
    [
        ("g++", ["-O0", "-march=x86-64"], []),
        ("aarch64-linux-gnu-g++", ["-O2", "-static"], ["qemu-aarch64"]),
    ],
    ids=["plain x86-64", "aarch64"],
)
def test_another_machine_writes_the_same_stream(compiler, flags, emulator, tmp_path):
    for tool in (compiler, *emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} here")
    source = Path(native.__file__).parent
    (tmp_path / "encode.cpp").write_text(PROGRAM)
    program = tmp_path / "encode"
    subprocess.run(
        [compiler, "-std=c++20", *flags, f"-I{source}", str(tmp_path / "encode.cpp"), "-o", str(program)], check=True
    )
    tokens_BT, length_B = laid_out(TEXT[:2400], 4, PAIRS)
    tokens_BT[-1, length_B[-1] :] = 0  # the program tells them, too
    frequencies_BTV = frequencies(tokens_BT.shape, len(PAIRS))
    coder = Coder(lanes=4, words=PAIRS)
    coder.begin()
    ours = coder.encode(frequencies_BTV, tokens_BT, np.full(4, tokens_BT.shape[1])) + coder.finish()
    number = sorted(range(len(PAIRS)), key=PAIRS.__getitem__)
    ordered = [PAIRS[k] for k in number]
    begin = np.cumsum([0, *map(len, ordered)])
    sizes = np.array([4, tokens_BT.shape[1], len(PAIRS), begin[-1], 100_000])
    given = b"".join(part.tobytes() for part in (sizes, frequencies_BTV, np.array(number), np.argsort(number), begin))
    given += b"".join(ordered) + tokens_BT.tobytes()
    theirs = subprocess.run([*emulator, str(program)], input=given, capture_output=True, check=True).stdout
    assert theirs == ours
