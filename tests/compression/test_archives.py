"""Every text comes back byte for byte; what is damaged, forged or somebody else's is refused in a sentence, soon, and nothing is written."""

import gc
import io
import json
import os
import platform
import random
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from damage import crc_of, damaged, parts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import transformer_xl as txl
from small_models import build
from transformer_xl.cli import main
from transformer_xl.compressing import coder_of
from transformer_xl.compression import TextCoder, compress_stream, decompress_stream, streams
from transformer_xl.compression.archive import BLOCK, MAGIC
from transformer_xl.data.text.tokenizers import ByteTokenizer
from transformer_xl.errors import ConfigError, DataError, InputError, TransformerXLError
from transformer_xl.native import building, recipe

TEXT = Path(json.__file__).read_bytes()
NOISE = bytes((37 * place * place + 11 * place) % 251 ^ place >> 3 & 255 for place in range(400))
ALL, SECONDS, MEGABYTES = 2000, 5.0, 1000
LEVELS = st.sampled_from(["fast", "best"])
TEXTS = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=120).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.text(alphabet=string.ascii_letters + " \n", max_size=600).map(str.encode),
    st.builds(lambda part, times: part * times, st.binary(min_size=1, max_size=20), st.integers(1, 60)),
    st.builds(lambda start, size: TEXT[start : start + size], st.integers(0, len(TEXT)), st.integers(0, 900)),
    st.builds(lambda left, right: left + NOISE[:250] + right, st.binary(max_size=200), st.binary(max_size=200)),
)
LENIENT = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


def comes_back(loaded, data, level):
    archive = txl.compress(data, model=loaded, level=level)
    assert len(archive) <= len(data) + 64
    assert txl.decompress(archive, model=loaded) == data


@settings(max_examples=40, **LENIENT)
@given(data=TEXTS, level=LEVELS)
def test_what_was_compressed_comes_back(either, small_blocks, data, level):
    comes_back(either, data, level)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=10_000, **LENIENT)
@given(data=TEXTS, level=LEVELS)
def test_ten_thousand_texts_come_back(either, small_blocks, data, level):
    comes_back(either, data, level)


@pytest.mark.parametrize("data", [b"", b"a", b"\x00", TEXT[:4500]], ids=["nothing", "a byte", "a zero", "text"])
@pytest.mark.parametrize("level", ["fast", "best"])
def test_with_blocks_and_lanes_as_they_are(either, data, level):
    comes_back(either, data, level)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_file_of_pythons_library_comes_back(either):
    library = Path(json.__file__).parents[1]
    # What somebody installed beside it is not Python's, and may be hundreds of megabytes.
    paths = [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    assert len(paths) > 500
    for path in paths:
        comes_back(either, path.read_bytes(), "fast")


def test_text_becomes_smaller_and_noise_hardly_larger(loaded):
    assert len(txl.compress(TEXT[:3000], model=loaded)) < 1600
    assert len(txl.compress(NOISE * 10, model=loaded)) < 1500
    assert len(txl.compress(NOISE, model=loaded)) <= len(NOISE) + 36


def test_threads_change_no_byte(either):
    archives = []
    for threads in (1, 2):
        out = io.BytesIO()
        compress_stream(io.BytesIO(TEXT[:6000]), out, coders(either, threads), level="fast", advance=nobody)
        archives.append(out.getvalue())
    assert archives[0] == archives[1]
    out = io.BytesIO()
    decompress_stream(io.BytesIO(archives[0]), out, coders(either, 2), name="it", advance=nobody, hold=False)
    assert out.getvalue() == TEXT[:6000]


def coders(loaded, threads):
    return lambda lanes: TextCoder(loaded.model, loaded.tokenizer, lanes=lanes, threads=threads)


def nobody(amount=1, *, note=None):
    pass


class Pipe(io.RawIOBase):
    """Gives a little at a time, and cannot go back."""

    def __init__(self, data: bytes) -> None:
        self.left = data

    def read(self, size=-1):
        some, self.left = self.left[: min(size, 70)], self.left[min(size, 70) :]
        return some

    def seekable(self):
        return False


def test_a_pipe_gives_the_same_archive_in_blocks_as_they_come(loaded, small_blocks):
    data = TEXT[:1100] + NOISE
    out = io.BytesIO()
    compress_stream(Pipe(data), out, coder_of(loaded), level="fast", advance=nobody)
    assert out.getvalue() == txl.compress(data, model=loaded)
    head, blocks = parts(out.getvalue())
    assert head.lanes == 25
    assert [block.size for block, _ in blocks] == [200] * 7 + [100]
    assert [block.stream is None for block, _ in blocks][-2:] == [True, True]
    pieces = []

    class Sink(io.RawIOBase):
        def write(self, piece):
            pieces.append(bytes(piece))
            return len(piece)

    decompress_stream(Pipe(out.getvalue()), Sink(), coder_of(loaded), name="it", advance=nobody, hold=True)
    assert b"".join(pieces) == data
    # Of a damaged one, what came before the damage, and no byte of the block that is not right.
    pieces.clear()
    broken = out.getvalue()[:-3] + b"???"
    with pytest.raises(DataError, match="damaged"):
        decompress_stream(Pipe(broken), Sink(), coder_of(loaded), name="it", advance=nobody, hold=True)
    assert b"".join(pieces) == data[:1400]


def refuse(loaded, archive, right):
    started_at = time.monotonic()
    with pytest.raises(TransformerXLError) as refused:
        txl.decompress(archive, model=loaded)
    assert time.monotonic() - started_at < SECONDS
    assert isinstance(refused.value, DataError), refused.value
    assert "\n" not in str(refused.value)
    assert right != archive


@contextmanager
def forgotten_peak() -> Iterator[Callable[[], float]]:
    """Megabytes that this process came to have beyond those it had, whatever it had at most before: the tests before it may have had gigabytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = kilobytes("VmRSS")
    yield lambda: (kilobytes("VmHWM") - before) / 1024


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def archives(loaded):
    yield txl.compress(TEXT[:1100] + NOISE, model=loaded)
    yield txl.compress(TEXT[:150], model=loaded, level="best")
    yield txl.compress(NOISE[:100], model=loaded)


@pytest.mark.skipif(sys.platform != "linux", reason="tells what it has at most on Linux alone")
@pytest.mark.parametrize("count", [99, pytest.param(ALL, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_damaged_archives_are_refused(either, small_blocks, count):
    with forgotten_peak() as peak:
        for which, right in enumerate(archives(either)):
            for number in range(count // 3 + 1):
                refuse(either, damaged(right, 10_000 * which + number), right)
                if number % 5 == 0:  # a coder has 70 MB, and an error keeps the one it was raised in
                    gc.collect()
    assert peak() < MEGABYTES


def test_every_cut_and_every_flipped_byte_is_refused(either):
    right = txl.compress(TEXT[:150], model=either)
    for place in range(len(right)):
        refuse(either, right[:place], right)
        refuse(either, right[:place] + bytes([right[place] ^ 255]) + right[place + 1 :], right)


BOMB = MAGIC + b"\x02" + bytes(8) + b"\x01"


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (b"\x03" + b"\x80\x80\x80\x80\x04" + b"\x0a", "a block of 1,073,741,824 bytes coded as 10"),
        (b"\x03" + b"\x80\x80\x40" + b"\x81\x80\x40", "a block of 1,048,576 bytes coded as 1,048,577"),
        (b"\x03" + b"\x00" + b"\x00", "a block of 0 bytes"),
        (b"\x01" + b"\xff" * 8 + b"\x7f", "cannot be"),
        (b"\x01" + b"\xff" * 9 + b"\x01", "a size in it is none"),
        (b"\x01" + b"\x81\x00", "a size in it is none"),
        (b"\x01" + b"\x80" * 6 + b"\x01" + bytes(12), "not as it was written"),
        (b"\x07" + b"\x01", "a block of kind 7"),
    ],
)
def test_a_head_that_promises_too_much_is_refused_at_once(loaded, block, told):
    for data in (BOMB + block, BOMB + block + bytes(5000)):
        with pytest.raises(DataError, match=f"{told}|ends too early|damaged"):
            txl.decompress(data, model=loaded)
    with pytest.raises(DataError, match=told):
        txl.decompress(BOMB + block + bytes(2 * BLOCK), model=loaded)


def test_a_stored_block_that_promises_terabytes_allocates_nothing(loaded):
    told = b"\x01" + b"\x80" * 5 + b"\x20" + bytes(8)
    before = streams.checksum_of(BOMB)
    with pytest.raises(DataError, match="ends too early"):
        txl.decompress(BOMB + told + crc_of(before, told) + bytes(1000), model=loaded)


def test_another_version_another_file_and_other_lanes(loaded):
    for data, told in (
        (b"", "no file that txl compress wrote"),
        (b"PK\x03\x04 and more", "no file that txl compress wrote"),
        (MAGIC + b"\x01" + bytes(20), "has format 1, and this version reads 2"),
        (MAGIC + b"\x02" + bytes(8) + b"\x00" + bytes(20), "names 0 lanes"),
        (MAGIC + b"\x02" + bytes(8) + b"\x41" + bytes(20), "names 65 lanes"),
    ):
        with pytest.raises(DataError, match=told):
            txl.decompress(data, model=loaded)


def test_models_that_cannot_compress(recurrent_run, word_store, word_config, tmp_path_factory):
    from transformer_xl.training import train

    folder = tmp_path_factory.mktemp("runs") / "words"
    train(word_config, store=word_store, folder=folder, command="txl train words")
    for model, told in (
        (recurrent_run, "this model is of the kind Recurrent"),
        (folder, "this one has word tokens"),
    ):
        with pytest.raises((InputError, ConfigError), match=told):
            txl.compress(b"some text", model=model)


@pytest.mark.parametrize("values", [b"\n abcdefghijklmnopqrstuvwxyz", b"x"], ids=["letters", "one byte"])
def test_bytes_that_the_model_has_no_token_for(values, small_blocks):
    model = build(vocabulary=len(values)).float()
    data = b"only these letters\n" * 30 + bytes(range(256)) + "größer\n".encode() * 20

    def coder(lanes):
        return TextCoder(model, ByteTokenizer(values, dropped=b"\r"), lanes=lanes)

    out, back = io.BytesIO(), io.BytesIO()
    compress_stream(io.BytesIO(data), out, coder, level="best", advance=nobody)
    decompress_stream(io.BytesIO(out.getvalue()), back, coder, name="it", advance=nobody, hold=False)
    assert back.getvalue() == data


BUILD = """
import sys
from transformer_xl.native import building
building.FLAGS, building._shipped = (f"-march={sys.argv[1]}",), lambda: None
from transformer_xl.cli import main
raise SystemExit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_build_reads_what_every_other_wrote(trained_run, tmp_path):
    """That for exactly this processor and those for lesser ones, by one thread and by two."""
    features = {word for line in building._processor().splitlines() for word in line.partition(":")[2].split()}
    sets = recipe.SETS.get(platform.machine(), {})
    builds = ["native", *(march for march, needed in sets.items() if set(needed) <= features)]

    def run(march: str, threads: int, *words: object) -> None:
        command = [sys.executable, "-c", BUILD, march, *map(str, words), "--model", str(trained_run)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)

    (tmp_path / "text").write_bytes(TEXT[:5000] + NOISE)
    for number, march in enumerate(builds):
        run(march, 1 + number % 2, "compress", tmp_path / "text", "-o", tmp_path / f"{march}.txl")
    assert len({(tmp_path / f"{march}.txl").read_bytes() for march in builds}) == 1
    for number, march in enumerate(builds):
        run(march, 2 - number % 2, "decompress", tmp_path / "native.txl", "-o", tmp_path / march)
        assert (tmp_path / march).read_bytes() == (tmp_path / "text").read_bytes()


def test_noise_in_many_blocks_is_stored_as_one(loaded, small_blocks, trained_run, tmp_path):
    chance = random.Random(3).randbytes(2000)
    assert len(parts(txl.compress(chance, model=loaded))[1]) == 1
    (tmp_path / "noise").write_bytes(chance)
    assert main(["compress", str(tmp_path / "noise"), "--model", str(trained_run)]) == 0
    assert (tmp_path / "noise.txl").read_bytes() == txl.compress(chance, model=loaded)
    assert (tmp_path / "noise.txl").stat().st_size <= 2000 + 36
    # A pipe cannot be read again.
    out = io.BytesIO()
    compress_stream(Pipe(chance), out, coder_of(loaded), level="fast", advance=nobody)
    assert len(parts(out.getvalue())[1]) == 10
    assert txl.decompress(out.getvalue(), model=loaded) == chance


def test_tokens_that_do_not_spell_the_text_are_not_believed(pairs, monkeypatch):
    coder = TextCoder(pairs.model, pairs.tokenizer, lanes=1)
    monkeypatch.setattr(type(pairs.tokenizer), "encode", lambda self, text: np.array([5, 6, 7]))
    stream = coder.encode(TEXT[:400], advance=nobody)
    assert TextCoder(pairs.model, pairs.tokenizer, lanes=1).decode(stream, 400, advance=nobody) == TEXT[:400]


def test_a_token_of_a_megabyte_is_refused(pairs, monkeypatch):
    long = b"a" * 1_000_000
    plain = type(pairs.tokenizer).decode_bytes
    monkeypatch.setattr(
        type(pairs.tokenizer), "decode_bytes", lambda self, ids: long if list(ids) == [499] else plain(self, ids)
    )
    with pytest.raises(InputError, match="a token of 1,000,000 bytes"):
        TextCoder(pairs.model, pairs.tokenizer, lanes=1)


def test_a_stream_that_is_too_short_for_its_block_ends_soon(loaded):
    coder = TextCoder(loaded.model, loaded.tokenizer, lanes=1)
    started_at = time.monotonic()
    assert coder.decode(b"\x12\x34\x56", BLOCK, advance=nobody) == b""
    assert time.monotonic() - started_at < SECONDS
