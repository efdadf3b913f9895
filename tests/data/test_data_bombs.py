"""Files that become thousands of times as large, and servers that never stop sending: refused in one sentence, early, with little memory."""

import bz2
import gzip
import io
import lzma
import os
import resource
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress

import pytest
from data_helpers import one_sentence
from test_data_sources import CONTENT, SMALL, TEXTS, serve, small_ptb  # noqa: F401 (fixtures)

from transformer_xl.data.corpora.downloading import download
from transformer_xl.data.corpora.recipes import RECIPES, Place
from transformer_xl.data.corpora.unpacking import ALWAYS_ALLOWED, MOST_FOLD, zstd
from transformer_xl.errors import DataError

STRETCH = 16 << 20
STRETCHES = 200
"""Together 3.2 GB, of which each compressed file below holds a few MB at most."""
MOST_MEMORY_KB = 400_000
ADDRESS_SPACE = 2 << 30


def many_streams(compress: Callable[[bytes], bytes]) -> bytes:
    """Compressed files may follow one another in one file, which is how a large one is made at once."""
    return compress(bytes(STRETCH)) * STRETCHES


def deflated_zeros() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    stretch = packer.compress(bytes(STRETCH)) + packer.flush(zlib.Z_FULL_FLUSH)
    return stretch * STRETCHES + zlib.compressobj(9, zlib.DEFLATED, -15).flush()


def raw_zip(name: str, data: bytes, *, unpacked: int, method: int = 8, flags: int = 0, copies: int = 1) -> bytes:
    """An archive written by hand: `copies` entries of the list all point at one member."""
    common = struct.pack("<HHHHHIII", 20, flags, method, 0, 0x21, 0, len(data), unpacked)
    local = b"PK\x03\x04" + common + struct.pack("<HH", len(name), 0) + name.encode() + data
    listed = b"".join(
        b"PK\x01\x02\x14\x00"
        + common
        + struct.pack("<HHHHHII", len(name) + bool(copy), 0, 0, 0, 0, 0, 0)
        + (name + "x" * bool(copy)).encode()
        for copy in range(copies)
    )
    return local + listed + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, copies, copies, len(listed), len(local), 0)


def bombs(name: str) -> dict[str, bytes]:
    header = tarfile.TarInfo(f"simple-examples/data/{name}")
    header.size = STRETCH * STRETCHES
    long_name = tarfile.TarInfo("long")
    long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, STRETCH * STRETCHES
    return {
        f"{name}.gz": many_streams(lambda data: gzip.compress(data, 9)),
        f"{name}.bz2": many_streams(bz2.compress),
        f"{name}.zst": many_streams(zstd.compress),
        f"{name}.xz": many_streams(lambda data: lzma.compress(data, preset=1)),
        "a.zip": raw_zip(name, deflated_zeros(), unpacked=STRETCH * STRETCHES),
        "a.tar.gz": gzip.compress(header.tobuf()) + many_streams(gzip.compress),
        "long.tar.bz2": bz2.compress(long_name.tobuf(tarfile.GNU_FORMAT)) + many_streams(bz2.compress),
    }


TELLING_ITS_MEMORY = """
import re, sys
from transformer_xl.cli import main
code = main(sys.argv[1:])
with open("/proc/self/status", encoding="utf-8") as file:
    print(re.search(r"VmHWM:\\s*(\\d+)", file.read())[1], file=sys.stderr)
sys.exit(code)
"""
# Not the parent's ru_maxrss, which counts what the parent itself had taken when it forked.


def limited(*words: object) -> tuple[int, str, int]:
    """`txl` in a process of its own with 2 GB of addresses: its exit code, what it said, and its largest memory in kB."""
    command = [sys.executable, "-c", TELLING_ITS_MEMORY, *map(str, words)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))  # noqa: E731
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=limit) as child:
        assert child.stderr is not None
        *said, kilobytes = child.stderr.read().splitlines(keepends=True)
    lines = [line for line in said if line.startswith("txl: ") or "MB" not in line]
    return child.returncode, "".join(lines), int(kilobytes)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return bombs("ptb.test.txt")


@pytest.mark.parametrize(
    "kind", ["ptb.test.txt.gz", "ptb.test.txt.bz2", "ptb.test.txt.xz", "a.zip", "a.tar.gz", "long.tar.bz2"]
)
def test_a_bomb_instead_of_a_known_file(kind, files, tmp_path):
    assert len(files[kind]) < 20_000_000
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / kind).write_bytes(files[kind])
    source = tmp_path / "in" if kind.startswith("ptb") else tmp_path / "in" / kind
    code, said, kilobytes = limited("prepare", "ptb", "--splits", "test", "--source", source, "--out", tmp_path / "out")
    assert code == 2, said
    assert one_sentence(said), said
    assert kind in said
    assert kilobytes < MOST_MEMORY_KB
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    "kind", ["ptb.test.txt.gz", "ptb.test.txt.bz2", "ptb.test.txt.xz", "ptb.test.txt.zst", "a.zip", "a.tar.gz"]
)
def test_a_bomb_as_ones_own_text(kind, files, tmp_path):
    path = tmp_path / kind
    path.write_bytes(files[kind])
    code, said, kilobytes = limited("prepare", path, "--binary", "keep", "--out", tmp_path / "out")
    assert code == 2, said
    assert one_sentence(said), said
    assert f"{max(ALWAYS_ALLOWED, MOST_FOLD * len(files[kind])):,} bytes" in said
    assert "unpack it" in said
    assert kilobytes < MOST_MEMORY_KB
    assert [path.name for path in tmp_path.iterdir()] == [kind]


def test_a_bomb_as_a_vocabulary(files, tmp_path):
    for split in ("valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text("a\n")
    (tmp_path / "words.gz").write_bytes(files["ptb.test.txt.gz"])
    words = ("wikitext-103", "--splits", "valid,test", "--source", tmp_path, "--vocab", tmp_path / "words.gz")
    code, said, kilobytes = limited("prepare", *words, "--out", tmp_path / "out")
    assert code == 2
    assert "words.gz becomes more than 268,435,456 bytes" in said
    assert kilobytes < 2 * MOST_MEMORY_KB


def test_members_of_a_zip_that_lie_over_each_other_count_together(txl, tmp_path):
    data = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = data.compress(bytes(1 << 20)) + data.flush()
    path = tmp_path / "a.zip"
    path.write_bytes(raw_zip("a", packed, unpacked=ALWAYS_ALLOWED // 2 + 1, copies=2))
    code, _, err = txl("prepare", path, "--out", tmp_path / "out")
    assert code == 2
    assert "a.zip becomes more than" in err


def test_an_xz_file_may_not_ask_for_a_gigabyte_of_dictionary(txl, tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 4096}]
    packed = bytearray(lzma.compress(b"text\n" * 100, filters=filters))
    assert packed[16] == 0  # the dictionary's size, as a power of two
    packed[16] = 38
    packed[20:24] = zlib.crc32(packed[12:20]).to_bytes(4, "little")
    path = tmp_path / "a.xz"
    path.write_bytes(packed)
    code, _, err = txl("prepare", path, "--out", tmp_path / "out")
    assert code == 2
    assert "a.xz is damaged or cut short (Memory usage limit exceeded)" in err


def test_two_files_of_one_name_in_a_tar_are_refused(small_ptb, txl, tmp_path):  # noqa: F811
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for folder in ("a", "b"):
            for name, text in TEXTS.items():
                member = tarfile.TarInfo(f"{folder}/ptb.{name}.txt")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))
    code, _, err = txl("prepare", "ptb", "--source", tmp_path / "a.tar", "--out", tmp_path / "out")
    assert code == 2
    assert "holds ptb.train.txt twice" in err


def test_repetitive_text_is_no_bomb(txl, tmp_path):
    path = tmp_path / "log.xz"
    path.write_bytes(lzma.compress(b"the same line of a log, again and again\n" * 100_000))
    assert 4_000_000 > MOST_FOLD * path.stat().st_size
    code, _, err = txl("prepare", path, "--out", tmp_path / "out")
    assert code == 0, err


# --- archives that cannot be read


def encrypted_zip() -> bytes:
    return raw_zip("text.txt", bytes(12) + b"text", unpacked=4, method=0, flags=1)


def wide_zst() -> bytes:
    """As `zstd --long=30` writes it where it does not know the size beforehand."""
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 30})
    return packer.compress(b"text" * 1000) + packer.flush()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (encrypted_zip(), "is encrypted"),
        (raw_zip("text.txt", b"text", unpacked=4, method=14), "method 14"),
        (raw_zip("text.txt", b"text", unpacked=4, method=99), "method 99"),
        (raw_zip("text.txt", b"text", unpacked=4, method=0, flags=0x20), "damaged"),
        (bz2.compress(b"text" * 1000)[:20] + b"\xff" * 400, "damaged"),
        (gzip.compress(b"text" * 1000)[:20] + b"\xff" * 400, "damaged"),
        (lzma.compress(b"text" * 1000)[:40] + b"\xff" * 400, "damaged"),
        (lzma.compress(b"text" * 1000) + b"more", "damaged"),
        (zstd.compress(b"text" * 1000)[:-3], "ends before its end mark"),
        (zstd.compress(b"text" * 1000) + b"more", "damaged"),
        (wide_zst(), "too much memory"),
    ],
)
def test_what_cannot_be_unpacked_is_said_in_one_sentence(data, said, txl, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(data)
    code, _, err = txl("prepare", path, "--out", tmp_path / "out")
    assert code == 2
    assert one_sentence(err)
    assert said in err
    assert str(path) in err


def test_streams_of_xz_may_follow_each_other(txl, tmp_path):
    path = tmp_path / "a.xz"
    path.write_bytes(lzma.compress(b"first\n" * 100) + bytes(8) + lzma.compress(b"second\n" * 100))
    code, out, err = txl("prepare", path, "--split", "1", "--json", "--out", tmp_path / "out")
    assert code == 0, err
    assert '"bytes": 1300' in out


@pytest.mark.parametrize("empty_frame", [b"", b"\x50\x2a\x4d\x18\x03\0\0\0abc"])
def test_frames_of_zst_may_follow_each_other(empty_frame, txl, tmp_path):
    path = tmp_path / "a.zst"
    path.write_bytes(empty_frame + zstd.compress(b"first\n" * 100) + empty_frame + zstd.compress(b"second\n" * 100))
    code, out, err = txl("prepare", path, "--split", "1", "--json", "--out", tmp_path / "out")
    assert code == 0, err
    assert '"bytes": 1300' in out


@pytest.mark.parametrize("count", ["9" * 5000, "²", "-1"])
def test_a_count_that_is_none(count, txl, tmp_path):
    for split in ("valid", "test"):
        (tmp_path / f"wiki.{split}.tokens").write_text("a\n")
    (tmp_path / "words").write_text(f"a {count}\n", encoding="utf-8")
    words = ("wikitext-103", "--splits", "valid,test", "--source", tmp_path, "--vocab", tmp_path / "words")
    code, _, err = txl("prepare", *words, "--out", tmp_path / "out")
    assert code == 2
    assert "is no vocabulary" in err


# --- downloads


def test_a_download_that_says_it_is_too_long_is_refused_at_once(serve, tmp_path):  # noqa: F811
    _, address = serve(CONTENT)
    with pytest.raises(DataError, match="it has 76,800 bytes or more, where there are at most 1,000"):
        download(Place(address=address, at_most=1000), into=tmp_path)
    assert not list(tmp_path.iterdir())


class Endless(threading.Thread):
    """A server that sends without end and never says how much; it counts what was taken."""

    def __init__(self, head: bytes) -> None:
        import socket

        super().__init__(daemon=True)
        self.socket, self.head, self.sent = socket.create_server(("127.0.0.1", 0)), head, 0
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}/file.bin"

    def run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                with connection, suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(self.head)
                    while self.sent < 1 << 30:
                        self.sent += connection.send(bytes(65536))


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nContent-Length: nonsense\r\n\r\n"])
def test_a_download_without_end_stops_at_the_limit(head, serve, tmp_path):  # noqa: F811
    server = Endless(head)
    server.start()
    try:
        with pytest.raises(DataError, match="at most 5,000,000"):
            download(Place(address=server.address, at_most=5_000_000), into=tmp_path / "kept")
    finally:
        server.socket.close()
    assert server.sent < 100_000_000
    assert not list((tmp_path / "kept").iterdir())


def test_a_part_that_is_too_long_is_begun_anew(serve, tmp_path):  # noqa: F811
    server, address = serve(CONTENT)
    (tmp_path / "file.bin.part").write_bytes(bytes(100_000))
    assert download(Place(address=address, at_most=len(CONTENT)), into=tmp_path).read_bytes() == CONTENT
    assert server.asked == [None]


def test_every_known_place_and_file_has_a_limit():
    for recipe in RECIPES.values():
        assert all(place.at_most <= 2_000_000_000 for place in (*recipe.places, *recipe.vocabulary_places))
        assert all(file.most_bytes <= 1 << 30 for file in recipe.files)
    assert SMALL.files[0].most_bytes == len(TEXTS["train"])
    assert zipfile.ZIP_STORED == 0
