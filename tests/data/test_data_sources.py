"""Files in every wrapping, verified; downloads that are cut and go on."""

import bz2
import gzip
import hashlib
import http.server
import io
import lzma
import socket
import tarfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from data_helpers import one_sentence

from transformer_xl.data.corpora import downloading, recipes
from transformer_xl.data.corpora.downloading import download, download_any
from transformer_xl.data.corpora.recipes import PTB, Counts, KnownFile, Place
from transformer_xl.data.corpora.sources import Source, find_known
from transformer_xl.data.corpora.unpacking import kind_of
from transformer_xl.errors import DataError

TEXTS = {"train": b" a b c \n d e \n" * 50, "valid": b" a b \n", "test": b" c \n"}
SMALL = replace(
    PTB,
    files=tuple(
        KnownFile(name=f"ptb.{name}.txt", bytes=len(text), md5=hashlib.md5(text).hexdigest(), splits=(name,))
        for name, text in TEXTS.items()
    ),
    counts=Counts(tokens={"train": 350, "valid": 3, "test": 2}, vocabulary=6),
)


def tar_of(path: Path, mode: str) -> Path:
    with tarfile.open(path, mode) as archive:
        for name, text in TEXTS.items():
            info = tarfile.TarInfo(f"./simple-examples/data/ptb.{name}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
        archive.addfile(tarfile.TarInfo("../../escape.txt"))
    return path


def zip_of(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in TEXTS.items():
            archive.writestr(f"ptb/ptb.{name}.txt", text)
    return path


def folder_of(path: Path, compress, ending: str) -> Path:
    path.mkdir()
    for name, text in TEXTS.items():
        (path / f"ptb.{name}.txt{ending}").write_bytes(compress(text))
    return path


WRAPPINGS = {
    "plain": lambda path: folder_of(path / "plain", bytes, ""),
    "gz": lambda path: folder_of(path / "gz", gzip.compress, ".gz"),
    "xz": lambda path: folder_of(path / "xz", lzma.compress, ".xz"),
    "bz2": lambda path: folder_of(path / "bz2", bz2.compress, ".bz2"),
    "zip": lambda path: zip_of(path / "ptb.zip"),
    "folder with a zip": lambda path: zip_of(path / "ptb.zip").parent,
    "tar": lambda path: tar_of(path / "ptb.tar", "w"),
    "tgz": lambda path: tar_of(path / "simple-examples.tgz", "w:gz"),
    "tar.bz2": lambda path: tar_of(path / "ptb.tar.bz2", "w:bz2"),
}


@pytest.fixture
def small_ptb(monkeypatch):
    """A corpus with Penn Treebank's rule and names, small enough to wrap in every way."""
    monkeypatch.setitem(recipes.RECIPES, "ptb", SMALL)
    return SMALL


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_every_wrapping_gives_the_same_store(wrapping, small_ptb, txl, tmp_path):
    (tmp_path / "in").mkdir()
    source = WRAPPINGS[wrapping](tmp_path / "in")
    code, _, err = txl("prepare", "ptb", "--source", source, "--out", tmp_path / "out")
    assert code == 0, err
    assert (tmp_path / "out" / "vocabulary.txt").read_text() == "a\nb\nc\n<eos>\nd\ne\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    assert not any("scratch" in path.name for path in (tmp_path / "out").iterdir())


def test_one_known_file_may_have_any_name(tmp_path):
    known = replace(SMALL.files[0], name="enwik8")
    path = tmp_path / "renamed.bin"
    path.write_bytes(gzip.compress(TEXTS["train"]))
    (found,) = find_known((known,), source=path, scratch=tmp_path)["enwik8"]
    assert found.read() == TEXTS["train"]
    assert kind_of(path) == "gz"


def test_a_wrong_file_is_named_with_both_checksums(small_ptb, txl, tmp_path):
    source = folder_of(tmp_path / "in", bytes, "")
    (source / "ptb.valid.txt").write_bytes(b" a c \n")
    code, _, err = txl("prepare", "ptb", "--source", source, "--out", tmp_path / "out")
    assert code == 2
    assert one_sentence(err)
    assert "ptb.valid.txt" in err
    assert hashlib.md5(b" a c \n").hexdigest() in err
    assert hashlib.md5(TEXTS["valid"]).hexdigest() in err
    assert not (tmp_path / "out").exists()


def test_wrong_counts_are_refused(small_ptb, txl, tmp_path, monkeypatch):
    monkeypatch.setitem(recipes.RECIPES, "ptb", replace(SMALL, counts=Counts(tokens={"test": 3}, vocabulary=6)))
    source = folder_of(tmp_path / "in", bytes, "")
    code, _, err = txl("prepare", "ptb", "--source", source, "--out", tmp_path / "out")
    assert code == 2
    assert "came out as 2 tokens where 3 are known" in err
    monkeypatch.setitem(recipes.RECIPES, "ptb", replace(SMALL, counts=Counts(tokens={}, vocabulary=7)))
    code, _, err = txl("prepare", "ptb", "--source", source, "--out", tmp_path / "out")
    assert code == 2
    assert "6 where 7 is known" in err


def test_a_missing_file_is_named_with_its_checksum(small_ptb, txl, tmp_path):
    source = folder_of(tmp_path / "in", bytes, "")
    (source / "ptb.test.txt").unlink()
    code, _, err = txl("prepare", "ptb", "--source", source, "--out", tmp_path / "out")
    assert code == 2
    assert one_sentence(err)
    assert SMALL.files[2].md5 in err
    assert "--splits train,valid" in err
    code, _, err = txl("prepare", "ptb", "--source", source, "--splits", "train,valid", "--out", tmp_path / "out")
    assert code == 0, err


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(gzip.compress(TEXTS["train"] * 100)[:-20]),
        lambda path: path.write_bytes(lzma.compress(TEXTS["train"] * 100)[:-20]),
        lambda path: path.write_bytes(bz2.compress(TEXTS["train"] * 100)[:-20]),
        lambda path: path.write_bytes(zip_of(path).read_bytes()[:-30]),
        lambda path: path.write_bytes(b"\x1f\x8b\x08" + bytes(40)),
    ],
)
def test_damage_is_said_in_one_sentence(spoil, tmp_path, txl):
    path = tmp_path / "in.txt"
    spoil(path)
    code, _, err = txl("prepare", path, "--out", tmp_path / "out")
    assert code == 2
    assert one_sentence(err)
    assert f"{path}" in err
    assert "damaged or cut short" in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.txt"]


def test_a_truncated_tar_is_damaged(small_ptb, tmp_path, txl):
    whole = tar_of(tmp_path / "in.tgz", "w:gz").read_bytes()
    (tmp_path / "in.tgz").write_bytes(whole[: len(whole) // 2])
    code, _, err = txl("prepare", "ptb", "--source", tmp_path / "in.tgz", "--out", tmp_path / "out")
    assert code == 2
    assert one_sentence(err)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in.tgz"]


class CutServer(http.server.ThreadingHTTPServer):
    """Serves one file with ranges, breaking each connection after `limit` bytes."""

    def __init__(self, content: bytes, *, limit: int | None = None, ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), CutHandler)
        self.content, self.limit, self.ranges = content, limit, ranges
        self.asked: list[str | None] = []

    def handle_error(self, request, client_address) -> None:
        """A client that leaves is no news."""


class CutHandler(http.server.BaseHTTPRequestHandler):
    server: CutServer

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        if "missing" in self.path:
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.server.ranges else 0
        rest = self.server.content[start:]
        if asked and self.server.ranges and not rest:
            self.send_error(416)
            return
        self.send_response(206 if asked and self.server.ranges else 200)
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest if self.server.limit is None else rest[: self.server.limit])

    def log_message(self, format: str, *words: object) -> None:
        """Silence."""


@pytest.fixture
def serve(monkeypatch, tmp_path):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    running = []

    def start(content: bytes, **options: object) -> tuple[CutServer, str]:
        server = CutServer(content, **options)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        running.append((server, thread))
        return server, f"http://127.0.0.1:{server.server_port}/file.bin"

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


CONTENT = bytes(range(256)) * 300
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


def test_a_download_is_verified_and_kept(serve, tmp_path):
    server, address = serve(CONTENT)
    place = Place(address=address, checksum=SHA256)
    assert download(place, into=tmp_path / "kept").read_bytes() == CONTENT
    assert download(place, into=tmp_path / "kept").read_bytes() == CONTENT
    assert server.asked == [None]


def test_a_cut_download_goes_on(serve, tmp_path):
    server, address = serve(CONTENT, limit=30_000)
    path = download(Place(address=address, checksum=SHA256), into=tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.asked == [None, "bytes=30000-", "bytes=60000-"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.bin"]


def test_a_download_goes_on_where_an_earlier_run_stopped(serve, tmp_path):
    server, address = serve(CONTENT)
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    assert download(Place(address=address, checksum=SHA256), into=tmp_path).read_bytes() == CONTENT
    assert server.asked == ["bytes=1000-"]


def test_a_part_that_was_whole_already_is_taken(serve, tmp_path):
    _, address = serve(CONTENT)
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert download(Place(address=address, checksum=SHA256), into=tmp_path).read_bytes() == CONTENT


def test_a_server_without_ranges_sends_everything_again(serve, tmp_path):
    _, address = serve(CONTENT, ranges=False)
    (tmp_path / "file.bin.part").write_bytes(b"something else")
    assert download(Place(address=address, checksum=SHA256), into=tmp_path).read_bytes() == CONTENT


def test_a_wrong_download_is_refused_and_not_kept(serve, tmp_path):
    _, address = serve(CONTENT)
    with pytest.raises(DataError, match=f"sha256 is {SHA256[7:]} and should be 00ff"):
        download(Place(address=address, checksum="sha256:00ff"), into=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_dead_connection_keeps_what_came(serve, tmp_path):
    _, address = serve(CONTENT, limit=0)
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    with pytest.raises(DataError, match="1,000 bytes are kept"):
        download(Place(address=address, checksum=SHA256), into=tmp_path)
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:1000]


def test_a_corpus_is_downloaded_from_the_first_place_that_answers(serve, small_ptb, txl, tmp_path, monkeypatch):
    archive = tar_of(tmp_path / "simple-examples.tgz", "w:gz").read_bytes()
    _, address = serve(archive)
    places = (Place(address=address.replace("file.bin", "missing")), Place(address=address))
    monkeypatch.setitem(recipes.RECIPES, "ptb", replace(SMALL, places=places))
    code, _, err = txl("prepare", "ptb", "--out", tmp_path / "out")
    assert code == 0, err
    assert (tmp_path / "cache" / "transformer_xl" / "ptb" / "file.bin").read_bytes() == archive


def test_a_download_that_proves_wrong_inside_is_not_kept(serve, small_ptb, txl, tmp_path, monkeypatch):
    archive = zip_of(tmp_path / "a.zip").read_bytes()
    _, address = serve(archive)
    wrong = replace(SMALL.files[0], md5="0" * 32)
    monkeypatch.setitem(
        recipes.RECIPES, "ptb", replace(SMALL, places=(Place(address=address),), files=(wrong, *SMALL.files[1:]))
    )
    code, _, err = txl("prepare", "ptb", "--out", tmp_path / "out")
    assert code == 2
    assert "0" * 32 in err
    assert not list((tmp_path / "cache" / "transformer_xl" / "ptb").iterdir())


def test_without_a_network_the_file_and_the_list_of_places_are_named(serve, txl, tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/enwik8.zip"
    monkeypatch.setitem(recipes.RECIPES, "enwik8", replace(recipes.ENWIK8, places=(Place(address=address),)))
    code, _, err = txl("prepare", "enwik8", "--out", tmp_path / "out")
    assert code == 2
    assert one_sentence(err)
    assert "bring enwik8 (md5 a1fa5ffddb56f4953e226637dabbb36a)" in err
    assert "docs/data.md" in err
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_that_cannot_be_downloaded_is_named(serve, monkeypatch):
    _, address = serve(b"")
    recipe = replace(recipes.LM1B, vocabulary_places=(Place(address=address.replace("file.bin", "missing")),))
    with pytest.raises(DataError, match=r"HTTP 404.*bring 1b_word_vocab.txt with `vocabulary_file=FILE`"):
        download_any(recipe, vocabulary=True)


def test_a_cache_that_cannot_be_written_is_named(serve, tmp_path):
    _, address = serve(CONTENT)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        download(Place(address=address), into=tmp_path / "file" / "below")


def test_the_cache_follows_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert downloading.cache_folder() == tmp_path / "transformer_xl"


def test_every_known_place_is_listed(txl, capsys):
    with pytest.raises(SystemExit):
        txl("prepare", "--help")
    printed = capsys.readouterr().out
    document = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for recipe in recipes.RECIPES.values():
        for place in (*recipe.places, *recipe.vocabulary_places):
            assert place.address in printed
            assert place.address in document
        for file in recipe.files:
            assert file.md5 is None or file.md5 in document


def test_a_source_says_when_it_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        Source(path=tmp_path / "nothing").read()
