"""Stores in object storage: in fsspec's memory, in its local files and behind a real HTTP server. Copied once, checked, and read like any other."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest

from small_run import SMALL
from transformer_xl.data.corpora.own_text import OwnText, prepare_own_text
from transformer_xl.data.remote import is_address
from transformer_xl.data.store import open_store
from transformer_xl.errors import DataError

ADDRESS = "memory://bucket/data/story"
TEXT = "the cat sat on the mat\nand the dog on the cat\n" * 200


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Of stores alone: the compiled kernels stay where they are."""
    monkeypatch.setattr("transformer_xl.data.remote.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "stores"


@pytest.fixture(params=["byte", "word", "bpe"])
def kind(request) -> str:
    return request.param


def prepared(folder: Path, *, tokenizer: str = "byte"):
    text = folder / "text"
    text.write_text(TEXT)
    size = {"vocabulary_size": 300} if tokenizer == "bpe" else {}
    return prepare_own_text([text], out=folder / "store", settings=OwnText(tokenizer=tokenizer, **size))


@pytest.fixture
def store(tmp_path):
    return prepared(tmp_path)


@pytest.fixture
def bucket(store):
    """fsspec's memory, with the store in it."""
    files = fsspec.filesystem("memory")
    files.put(str(store.folder), "/bucket/data/story", recursive=True)
    yield files
    files.rm("/bucket", recursive=True)


def copies(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()] if cache.exists() else []


def assert_the_same(opened, store) -> None:
    assert opened.manifest == store.manifest
    assert opened.fingerprint() == store.fingerprint()
    assert opened.tokenizer.size == store.tokenizer.size
    for name in store.splits:
        mine, other = opened.split(name), store.split(name)
        assert isinstance(mine.tokens, np.memmap)
        assert np.array_equal(mine.tokens, other.tokens)
        assert np.array_equal(mine.document_starts, other.document_starts)


def test_local_files_by_address(kind, tmp_path, cache):
    store = prepared(tmp_path, tokenizer=kind)
    opened = open_store(f"file://{store.folder}/")
    assert opened.address == f"file://{store.folder}"
    assert opened.folder.parent == cache
    assert_the_same(opened, store)


def test_memory(store, bucket, cache):
    assert_the_same(open_store(ADDRESS, verify=True), store)


@pytest.fixture
def server(store):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=store.folder.parent)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.filterwarnings("ignore:unclosed")  # aiohttp's own loop stays until the process ends
def test_a_real_server(store, server, cache):
    pytest.importorskip("aiohttp")
    assert_the_same(open_store(f"{server}/store"), store)
    with pytest.raises(DataError, match=r"/nowhere holds no data store \(there is no manifest.json\)"):
        open_store(f"{server}/nowhere")


def test_it_is_fetched_once_and_named_by_what_it_holds(store, bucket, cache, tmp_path):
    first = open_store(ADDRESS)
    for name in ("train", "valid", "test"):
        bucket.rm(f"/bucket/data/story/{name}.tokens.bin")  # nobody asks for them again
    assert open_store(ADDRESS).folder == first.folder
    (tmp_path / "other").mkdir()
    other = prepared(tmp_path / "other", tokenizer="char")
    bucket.put(str(other.folder), "/bucket/other", recursive=True)
    assert open_store("memory://bucket/other").folder != first.folder
    assert len(copies(cache)) == 2


def test_a_damaged_copy_is_fetched_anew(store, bucket, cache, capsys):
    tokens = open_store(ADDRESS).folder / "train.tokens.bin"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-1])
    assert_the_same(open_store(ADDRESS), store)
    assert "is damaged" in capsys.readouterr().err
    tokens.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # as large as it was: seen by who looks at checksums
    open_store(ADDRESS)
    assert tokens.read_bytes() != whole
    assert_the_same(open_store(ADDRESS, verify=True), store)
    assert tokens.read_bytes() == whole


CHANGES = {
    "shorter": (lambda data: data[:-1], r"train\.tokens\.bin has only [\d,]+ bytes where the manifest says"),
    "longer": (lambda data: data + b"x", r"train\.tokens\.bin has more bytes where the manifest says"),
    "altered": (
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        r"train\.tokens\.bin has sha256 \w+ where the manifest",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_bytes_than_the_manifest_says_are_refused_and_nothing_is_kept(change, bucket, cache):
    how, named = CHANGES[change]
    place = "/bucket/data/story/train.tokens.bin"
    bucket.pipe_file(place, how(bucket.cat_file(place)))
    with pytest.raises(DataError, match=named):
        open_store(ADDRESS)
    assert copies(cache) == []


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer.json", "valid.tokens.bin"])
def test_a_missing_file_is_named(name, bucket, cache):
    bucket.rm(f"/bucket/data/story/{name}")
    with pytest.raises(DataError, match=name):
        open_store(ADDRESS)
    assert copies(cache) == []


def file_named(name):
    def change(manifest):
        manifest["splits"][0]["files"].append({"name": name, "bytes": 1, "sha256": "0" * 64})

    return change


def grown(manifest):
    for split in manifest["splits"][:1]:
        split["tokens"] = 1 << 50
        split["files"][0]["bytes"] = 1 << 50


def renamed(manifest):
    manifest["splits"][0]["name"] = "../../train"


HOSTILE = {
    **{name: (file_named(name), "is damaged") for name in ("../escape", "/etc/x.tokens.bin", "..", "a\0.tokens.bin")},
    **{
        name: (file_named(name), "is damaged")
        for name in ("manifest.json", "train.tokens.bin", "x.so", ".a.tokens.bin")
    },
    "larger than any disk": (grown, r"takes 1,125,\d{3},\d{3},\d{3},\d{3} bytes, and .* has room for"),
    "a split elsewhere": (renamed, "is damaged"),
    "no manifest": (lambda manifest: manifest.clear(), "is damaged"),
    "another version": (lambda manifest: manifest.update(version=99), "version 99"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_manifests(what, bucket, cache, tmp_path):
    change, named = HOSTILE[what]
    place = "/bucket/data/story/manifest.json"
    manifest = json.loads(bucket.cat_file(place))
    change(manifest)
    bucket.pipe_file(place, json.dumps(manifest).encode())
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=named):
        open_store(ADDRESS)
    assert copies(cache) == []
    assert [path for path in sorted(tmp_path.iterdir()) if path not in before and path.name != "cache"] == []


def test_a_manifest_without_end_is_not_read(bucket, cache):
    bucket.pipe_file("/bucket/data/story/manifest.json", b" " * (17 << 20))
    with pytest.raises(DataError, match="more than 16,777,216 bytes"):
        open_store(ADDRESS)


def test_what_is_missing_is_said_in_one_sentence(txl, monkeypatch, cache):
    code, _, said = txl("data", "nosuch://bucket/store")
    assert (code, said.count("\n")) == (2, 1)
    assert "nosuch://bucket/store cannot be read (ValueError: Protocol not known" in said
    monkeypatch.setitem(sys.modules, "s3fs", None)
    code, _, said = txl("data", "s3://bucket/store")
    assert (code, said.count("\n")) == (2, 1)
    assert said.endswith("for s3:// install it with: pip install 'transformer-xl[remote]'\n")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    code, _, said = txl("data", "s3://bucket/store")
    assert said == (
        "txl: s3://bucket/store is read through fsspec; install it with: pip install 'transformer-xl[remote]'\n"
    )


def test_a_store_is_not_written_to_an_address(txl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text(TEXT)
    code, _, said = txl("prepare", "text", "--out", "s3://bucket/store")
    assert (code, said.count("\n")) == (2, 1)
    assert "is an address, and a store is written into a folder" in said
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_addresses_are_told_from_paths():
    assert all(map(is_address, ["s3://bucket/x", "memory://x", "gs://a/b", "file:///data", Path("s3://bucket/x")]))
    assert not any(map(is_address, ["data/enwik8", "/data", "C:/data", r"C:\data", "./s3", "a:b", Path("data")]))


def test_commands_take_addresses_and_a_run_says_where_its_data_lies(txl, store, bucket, cache, tmp_path):
    assert f"{len(store.split('train')):,}" in txl("data", ADDRESS, "--verify")[1]
    config = replace(SMALL, training=replace(SMALL.training, steps=2, validate_every=0, save_every=0))
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    code, _, said = txl("train", tmp_path / "config.json", "--data", ADDRESS, "--run", tmp_path / "run")
    assert code == 0, said
    code, _, said = txl("evaluate", tmp_path / "run", "--tokens", 50)
    assert code == 2
    assert f"lies at {ADDRESS}; have it read from there with --data {ADDRESS}" in said  # a file decides nowhere we go
    figures = []
    for data in (ADDRESS, store.folder):
        code, out, said = txl("evaluate", tmp_path / "run", "--tokens", 50, "--data", data, "--json")
        assert code == 0, said
        figures.append(json.loads(out)["loss_nats"])
    assert figures[0] == figures[1]


def test_processes_of_one_machine_fetch_it_once(store, tmp_path):
    script = "import sys; from transformer_xl.data.store import open_store; print(open_store(sys.argv[1]).folder)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    words = [sys.executable, "-c", script, f"file://{store.folder}"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    folders = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert folders == {str(copy) for copy in copies(tmp_path / "transformer_xl" / "stores")}
    assert len(folders) == 1
