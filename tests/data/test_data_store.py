"""Stores: what was written is what is read, and what is damaged is refused in one sentence."""

import json
import sys

import numpy as np
import pytest
from data_helpers import one_sentence, patient, write_split
from hypothesis import given
from hypothesis import strategies as st

from transformer_xl.data.corpora.own_text import OwnText, prepare_own_text
from transformer_xl.data.store import Manifest, open_store, smallest_dtype
from transformer_xl.errors import DataError


@pytest.fixture
def store(tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 200)
    settings = OwnText(tokenizer="word")
    return prepare_own_text([tmp_path / "text.txt"], out=tmp_path / "store", settings=settings)


@patient
@given(
    tokens=st.lists(st.integers(0, 70_000), min_size=1, max_size=50),
    starts=st.sets(st.integers(0, 49)),
)
def test_what_is_written_is_read(tmp_path_factory, tokens, starts):
    starts = sorted(start for start in starts if start < len(tokens))
    split = write_split(tmp_path_factory.mktemp("split"), tokens, vocabulary=max(tokens) + 1, documents=starts)
    assert split.tokens.tolist() == tokens
    assert split.document_starts.tolist() == starts
    assert len(split) == len(tokens)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(1, np.uint8), (256, np.uint8), (257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)],
)
def test_the_smallest_integers_that_fit(vocabulary, dtype):
    assert smallest_dtype(vocabulary) == dtype


def test_a_store_is_read_only_and_mapped(store):
    tokens = store.split("train").tokens
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_the_manifest_survives_json(store):
    manifest = store.manifest
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    assert manifest.vocabulary_size == store.tokenizer.size == 7
    assert manifest.splits[0].documents == 1


def test_preparing_twice_gives_the_same_bytes(store, tmp_path):
    settings = OwnText(tokenizer="word")
    again = prepare_own_text([tmp_path / "text.txt"], out=tmp_path / "again", settings=settings)
    for path in store.folder.iterdir():
        assert path.read_bytes() == (again.folder / path.name).read_bytes()


def test_no_store(tmp_path):
    with pytest.raises(DataError, match="holds no data store"):
        open_store(tmp_path)
    with pytest.raises(DataError, match="holds no data store"):
        open_store(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda text: "{", "damaged"),
        (lambda text: "[]", "damaged"),
        (lambda text: text.replace('"unit"', '"units"'), "unit"),
        (lambda text: text.replace('"sha256"', '"md5"'), "damaged"),
        (lambda text: text.replace('"version": 1', '"version": 99'), "version 99"),
    ],
)
def test_a_damaged_manifest(store, edit, named):
    path = store.folder / "manifest.json"
    path.write_text(edit(path.read_text()))
    with pytest.raises(DataError, match=named):
        open_store(store.folder)


def test_a_missing_a_shorter_and_an_altered_file(store):
    path = store.folder / "valid.tokens.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"valid\.tokens\.bin has"):
        open_store(store.folder)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    open_store(store.folder)  # the quick look sees sizes only
    with pytest.raises(DataError, match="sha256"):
        open_store(store.folder, verify=True)
    path.unlink()
    with pytest.raises(DataError, match="missing"):
        open_store(store.folder)


def test_an_unknown_split(store):
    with pytest.raises(DataError, match="did you mean train"):
        store.split("trian")


def test_txl_data_shows_it(store, txl, tmp_path):
    code, out, err = txl("data", store.folder, "--plot", tmp_path / "plot.png", "--verify")
    assert code == 0, err
    for shown in ("vocabulary 7", "perplexity per word", "checksums verified", "the cat sat on the mat", "1,080"):
        assert shown in out
    table = [line for line in out.split("\n") if line.startswith(("split", "train", "valid", "test"))][:4]
    assert len({len(line) for line in table}) == 1  # aligned
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_txl_data_as_json(store, txl):
    code, out, _ = txl("data", store.folder, "--json")
    assert code == 0
    shown = json.loads(out)
    assert shown["frequent"][0]["token"] == "the"
    assert shown["frequent"][0]["count"] == 360
    assert shown["unused_tokens"] == 1  # <unk>
    assert shown["splits"][0]["tokens"] == 1260


@pytest.mark.parametrize("words", [("nowhere",), ("store", "--plot", "plot.jpg"), ("store", "--plot", "no/plot.png")])
def test_txl_data_refuses_in_one_sentence(store, txl, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = txl("data", *words)
    assert code == 2
    assert out == ""
    assert one_sentence(err)


def test_a_plot_without_matplotlib_says_what_to_install(store, txl, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = txl("data", store.folder, "--plot", tmp_path / "plot.png")
    assert code == 2
    assert "transformer-xl[viz]" in err
