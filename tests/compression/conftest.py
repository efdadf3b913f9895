"""Archives of a few hundred bytes that have what large ones have: many lanes, and many blocks."""

import pytest

import transformer_xl as txl
from transformer_xl import native
from transformer_xl.compression import streams


def pytest_collection_modifyitems(items):
    if native.library() is None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler here"))


@pytest.fixture(scope="session")
def loaded(trained_run):
    return txl.load(trained_run, device="cpu")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(streams, "BLOCK", 200)
    monkeypatch.setattr(streams, "LANES", {"fast": (8, 64), "best": (32, 3)})
