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
EVERY = bytes(range(256))


def frequencies(shape: tuple[int, ...], tokens: int, *, seed: int = 0) -> np.ndarray:
    """Of a model that is sure of something at most places, and wrong."""
    chance = np.random.default_rng(seed)
    odds = np.exp(chance.normal(size=(*shape, tokens)) * chance.choice([0.1, 2, 8], size=(*shape, 1)))
    whole = 1 + (odds / odds.sum(-1, keepdims=True) * ((1 << 24) - tokens)).astype(np.int64)
    whole[..., 0] += (1 << 24) - whole.sum(-1)
    return whole.astype(np.uint32)


def laid_out(data: bytes, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    steps = -(-len(data) // lanes)
    bytes_BT = np.zeros((lanes, steps), dtype=np.uint8)
    bytes_BT.reshape(-1)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    return bytes_BT, np.clip(len(data) - steps * np.arange(lanes), 0, steps)


def decoded(coder, stream: bytes, frequencies_BTV: np.ndarray, length_B: np.ndarray) -> np.ndarray:
    coder.begin(stream)
    B, T = frequencies_BTV.shape[:2]
    found_BT = np.zeros((B, T), dtype=np.uint8)
    for step in range(T):
        found_BT[:, step] = coder.decode(np.ascontiguousarray(frequencies_BTV[:, step]), length_B > step)
    return found_BT


@pytest.mark.parametrize(
    ("data", "lanes", "values"),
    [
        (TEXT[:600], 1, EVERY),
        (TEXT[:301] + TEXT[100:300] + EVERY, 3, EVERY),
        (bytes(200) + EVERY + b"ab" * 100, 2, EVERY[::-1]),
        (np.random.default_rng(1).bytes(400), 64, EVERY),
        (TEXT[:200] + EVERY, 5, b"\n abcdefghijklmnopqrstuvwxyz"),
    ],
    ids=["text", "lanes", "runs", "noise", "bytes without a token"],
)
def test_the_stream_is_that_of_the_slow_twin(data, lanes, values):
    bytes_BT, length_B = laid_out(data, lanes)
    frequencies_BTV = frequencies(bytes_BT.shape, len(values))
    streams = []
    for kind in (Coder, SlowCoder):
        coder = kind(lanes=lanes, values=values)
        coder.begin()
        # In pieces, and then a second stream with what was counted in the first.
        first = coder.encode(
            np.ascontiguousarray(frequencies_BTV[:, :7]), np.ascontiguousarray(bytes_BT[:, :7]), length_B
        )
        rest = coder.encode(
            np.ascontiguousarray(frequencies_BTV[:, 7:]), np.ascontiguousarray(bytes_BT[:, 7:]), length_B - 7
        )
        streams.append([first + rest + coder.finish()])
        coder.begin()
        again = coder.encode(frequencies_BTV[:, :9].copy(), bytes_BT[:, :9].copy(), length_B)
        streams[-1].append(again + coder.finish())
    assert streams[0] == streams[1]
    for kind in (Coder, SlowCoder):
        coder = kind(lanes=lanes, values=values)
        assert np.array_equal(decoded(coder, streams[0][0], frequencies_BTV, length_B), bytes_BT)
        assert np.array_equal(decoded(coder, streams[0][1], frequencies_BTV[:, :9], length_B), bytes_BT[:, :9])


def test_what_is_expected_costs_nothing_and_what_is_not_costs_at_most_sixteen_bytes():
    data = b"x" * 5000
    bytes_BT, length_B = laid_out(data, 1)
    sure_V = np.ones(256, dtype=np.uint32)
    sure_V[ord("x")] = (1 << 24) - 255
    sizes = []
    for symbol in (ord("x"), ord("y")):
        frequencies_BTV = np.tile(np.roll(sure_V, symbol - ord("x")), (1, len(data), 1))
        coder = Coder(lanes=1, values=EVERY)
        coder.begin()
        sizes.append(len(coder.encode(frequencies_BTV, bytes_BT, length_B) + coder.finish()))
    assert sizes[0] <= 2
    assert sizes[1] < 60  # what is counted soon knows better than the model


def test_a_stream_that_ends_early_or_is_none_gives_some_bytes():
    frequencies_BTV = frequencies((2, 50), 256)
    for stream in (b"", b"\xff" * 3, bytes(100)):
        found = decoded(Coder(lanes=2, values=EVERY), stream, frequencies_BTV, np.array([50, 50]))
        assert found.shape == (2, 50)


def test_what_the_coder_does_not_take_is_refused():
    for wrong in ({"lanes": 0}, {"lanes": MOST_LANES + 1}, {"values": b""}, {"values": b"aa"}):
        with pytest.raises(InputError, match="a coder"):
            Coder(**{"lanes": 2, "values": EVERY} | wrong)
    coder = Coder(lanes=2, values=EVERY)
    coder.begin()
    good, data, lengths = frequencies((2, 4), 256), np.zeros((2, 4), dtype=np.uint8), np.array([4, 4])
    for given in (
        (good.astype(np.int64), data, lengths),
        (good[:, :3], data, lengths),
        (good[..., ::2], data, lengths),
        (good, data.astype(np.int8), lengths),
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
  int64_t sizes[3];
  if (fread(sizes, 8, 3, stdin) != 3) return 1;
  const int64_t lanes = sizes[0], steps = sizes[1], tokens = sizes[2];
  std::vector<uint32_t> frequencies(lanes * steps * tokens);
  std::vector<uint8_t> values(tokens), bytes(lanes * steps), out(16 * lanes * steps + 8);
  std::vector<int64_t> lengths(lanes, steps);
  if (fread(frequencies.data(), 4, frequencies.size(), stdin) != frequencies.size()) return 1;
  if (fread(values.data(), 1, tokens, stdin) != size_t(tokens)) return 1;
  if (fread(bytes.data(), 1, bytes.size(), stdin) != bytes.size()) return 1;
  static State state;
  coding_start(&state, lanes);
  coding_begin(&state, nullptr, 0);
  int64_t count = coding_encode(&state, frequencies.data(), tokens, values.data(), bytes.data(), steps, lengths.data(), out.data());
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
    bytes_BT, length_B = laid_out(TEXT[:2400], 4)
    frequencies_BTV = frequencies(bytes_BT.shape, 256)
    coder = Coder(lanes=4, values=EVERY)
    coder.begin()
    ours = coder.encode(frequencies_BTV, bytes_BT, length_B) + coder.finish()
    given = np.array([4, bytes_BT.shape[1], 256]).tobytes() + frequencies_BTV.tobytes() + EVERY + bytes_BT.tobytes()
    theirs = subprocess.run([*emulator, str(program)], input=given, capture_output=True, check=True).stdout
    assert theirs == ours
