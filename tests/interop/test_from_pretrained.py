"""`txl.from_pretrained` takes any checkpoint there is on this machine, without transformers, and leaves nothing behind."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import transformer_xl as txl
from small_models import build
from transformer_xl.checkpoint import RunFolder
from transformer_xl.errors import CheckpointError, ImportRefused
from transformer_xl.interop.formats.foreign_model import Lengths
from transformer_xl.interop.formats.huggingface import config_to_huggingface, weights_to_huggingface
from transformer_xl.interop.importing import import_run


@pytest.fixture
def theirs(tmp_path) -> Path:
    model = build(initial_memory="zeros", cutoffs=(4, 8)).float()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config_to_huggingface(model.config)))
    save_file(weights_to_huggingface(model.state_dict(), model.config), tmp_path / "theirs" / "model.safetensors")
    return tmp_path / "theirs"


def test_a_run_and_its_checkpoint_are_loaded_as_they_are(trained_run):
    expected = txl.load(trained_run, memory=20).generate("def ", tokens=30)
    for folder in (trained_run, RunFolder(trained_run).chosen_checkpoint()):
        assert txl.from_pretrained(folder, memory=20).generate("def ", tokens=30) == expected


def test_a_foreign_folder_or_file_is_imported_on_the_way(theirs, tmp_path):
    import_run(theirs, tmp_path / "run", lengths=Lengths(memory=9))
    expected = txl.load(tmp_path / "run")
    for source in (theirs, theirs / "model.safetensors"):
        loaded = txl.from_pretrained(source, memory=9)
        assert loaded.model.config == expected.model.config
        assert loaded.generate("3 1", tokens=20) == expected.generate("3 1", tokens=20)
        folder = loaded.checkpoint.folder
        assert (folder / "about.json").is_file()
        assert loaded.checkpoint.run is None
        weights = dict(loaded.model.state_dict())
        del loaded
        gc.collect()
        assert not folder.exists()
        assert all(bool(torch.isfinite(value).all()) for value in weights.values())  # they outlive their file


def test_what_is_not_here_is_not_downloaded_and_what_is_refused_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(
        CheckpointError, match="there is no transfo-xl/transfo-xl-wt103 here, and names of models on a hub"
    ):
        txl.from_pretrained("transfo-xl/transfo-xl-wt103")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "model.pt").write_bytes(b"no model at all")
    with pytest.raises(ImportRefused):
        txl.from_pretrained(tmp_path / "model.pt")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_it_needs_no_transformers(trained_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails
    assert txl.from_pretrained(trained_run).generate("def ", tokens=5)
