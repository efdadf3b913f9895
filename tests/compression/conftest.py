"""Archives of a few hundred bytes that have what large ones have: many lanes, and many blocks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import transformer_xl as txl
from transformer_xl import native
from transformer_xl.compression import streams

TEXT = Path(json.__file__).read_bytes() + Path(json.decoder.__file__).read_bytes()


def pytest_collection_modifyitems(items):
    if native.library() is None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler here"))


@pytest.fixture(scope="session")
def loaded(trained_run):
    return txl.load(trained_run, device="cpu")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """A model of byte pairs; no text is long enough for it to have learned much."""
    from small_run import SMALL
    from transformer_xl.training import train

    folder = tmp_path_factory.mktemp("pairs")
    (folder / "text").write_bytes(TEXT)
    store = txl.prepare(folder / "text", out=folder / "store", tokenizer="bpe", vocabulary_size=500)
    config = replace(SMALL, model=replace(SMALL.model, vocabulary=store.manifest.vocabulary_size))
    train(config, store=store, folder=folder / "run", command="txl train pairs")
    return txl.load(folder / "run", device="cpu")


@pytest.fixture(scope="session", params=["bytes", "pairs"])
def either(request):
    return request.getfixturevalue({"bytes": "loaded", "pairs": "pairs"}[request.param])


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(streams, "BLOCK", 200)
    monkeypatch.setattr(streams, "LANES", {"fast": (8, 64), "best": (32, 3)})
