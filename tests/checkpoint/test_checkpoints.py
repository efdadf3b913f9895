"""Checkpoints: whole or not at all, every damage named, and the one door to load them."""

import json
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import transformer_xl as txl
from transformer_xl.checkpoint import RunFolder, load_checkpoint, save_tensors, verify
from transformer_xl.cli import main
from transformer_xl.errors import CheckpointError, DataError


@pytest.fixture
def copied(trained_run, tmp_path) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


def test_files_are_safetensors_and_json_alone(trained_run):
    folder = RunFolder(trained_run).chosen_checkpoint()
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} <= {".safetensors", ".json", ".txt"}


def test_whoever_may_read_the_folder_may_read_the_weights(trained_run, tmp_path):
    """Of a group that shares its runs, or of all users of what an administrator installed."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o750)
    save_tensors({"weight": torch.zeros(2)}, tmp_path / "shared" / "model.safetensors")
    assert stat.S_IMODE((tmp_path / "shared" / "model.safetensors").stat().st_mode) == 0o640
    files = [path for path in RunFolder(trained_run).chosen_checkpoint().iterdir() if path.is_file()]
    assert len({stat.S_IMODE(path.stat().st_mode) for path in files}) == 1


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["trained_run", "recurrent_run"])
def test_loading_never_imports_the_compiler(kind, request):
    """It takes longer than all the rest of loading and generating."""
    words = ["generate", str(request.getfixturevalue(kind)), "--prompt", "a", "--tokens", "3"]
    code = f"import sys; from transformer_xl.cli import main; assert main({words!r}) == 0; assert 'torch._dynamo' not in sys.modules"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "training.safetensors",
        "training.json",
        "config.json",
        "about.json",
        "checksums.json",
        "tokenizer/tokenizer.json",
    ],
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_every_damage_is_named(copied, name, damage):
    folder = RunFolder(copied).chosen_checkpoint()
    path = folder / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        data[len(data) // 2] ^= 0x20
        path.write_bytes({"flip": data, "truncate": data[:-1], "empty": b""}[damage])
    with pytest.raises(CheckpointError, match=r"no checkpoint|damaged|missing"):
        verify(folder)
    assert main(["evaluate", str(copied)]) == 2


def test_a_file_that_does_not_belong_is_named(copied):
    folder = RunFolder(copied).chosen_checkpoint()
    (folder / "extra.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"extra.bin does not belong"):
        verify(folder)


def test_wrong_weights_are_named(trained_run, tmp_path):
    from transformer_xl.checkpoint.folder import load_model

    checkpoint = load_checkpoint(trained_run)
    weights = checkpoint.folder / "model.safetensors"
    wider = replace(checkpoint.config, model=replace(checkpoint.config.model, d_inner=64))
    with pytest.raises(
        CheckpointError, match=r"layers.0.inner.bias has shape \[32\] where config.json asks for \[64\]"
    ):
        load_model(weights, config=wider)
    deeper = replace(checkpoint.config, model=replace(checkpoint.config.model, n_layer=4000))
    with pytest.raises(CheckpointError, match=r"has 2 layers where config.json says 4000"):
        load_model(weights, config=deeper)
    (tmp_path / "bad.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_model(tmp_path / "bad.safetensors", config=checkpoint.config)


def test_a_name_out_of_a_file_writes_nothing_else_to_the_terminal(trained_run, tmp_path):
    """A line feed would make two sentences of one, and an escape sequence moves, colours or hides."""
    from transformer_xl.checkpoint.folder import load_model

    checkpoint = load_checkpoint(trained_run)
    strange = tmp_path / "strange.safetensors"
    save_file({**checkpoint.model.state_dict(), "new\nline\x1b[31m\u202e": torch.zeros(1)}, strange)
    with pytest.raises(CheckpointError) as raised:
        load_model(strange, config=checkpoint.config)
    assert str(raised.value) == rf"{strange} has a tensor new\nline\x1b[31m\u202e that config.json does not know"


def test_load_gives_what_the_tour_promises(trained_run):
    loaded = txl.load(trained_run, memory=20, clamp_len=6, same_length=True)
    assert (loaded.model.config.memory, loaded.model.config.clamp_len, loaded.model.config.same_length) == (20, 6, True)
    assert loaded.config.evaluation.memory == 20
    tokens = torch.from_numpy(loaded.tokenizer.encode("def f(): pass"))[None]
    output = loaded.model(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=None)
    assert output.loss_BT.shape == (1, tokens.shape[1] - 1)
    assert output.memory.length == tokens.shape[1] - 1
    assert loaded.evaluate(split="valid", tokens=100).tokens == 99
    assert len(loaded.per_token(split="valid")) == len(loaded.store().split("valid"))
    engine = loaded.engine(lanes=2)
    assert engine.feed(tokens.expand(2, -1)).shape == (2, 256)
    engine.save(trained_run / "samples" / "engine.safetensors")
    assert loaded.engine(state=trained_run / "samples" / "engine.safetensors").lanes == 2
    text = loaded.generate("def ", tokens=20, seed=3)
    assert isinstance(text, str)
    assert text == loaded.generate("def ", tokens=20, seed=3)


def test_score_is_the_models_own_loss(trained_run):
    loaded = txl.load(trained_run)
    text = "class Decoder:\n" * 40
    scores = loaded.score(text).nats[1:]
    ids = loaded.tokenizer.encode(text)
    assert len(scores) == len(ids) - 1
    tokens = torch.from_numpy(ids)[None]
    oracle = txl.load(trained_run).model
    oracle.config = replace(
        oracle.config, same_length=True, same_length_keys="memory+1"
    )  # every token sees the M before it
    parts, memory = [], None
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 50):
            piece = tokens[:, start : start + 51]
            output = oracle(piece[:, :-1], targets_BT=piece[:, 1:], memory=memory)
            memory = output.memory
            parts.append(output.loss_BT[0].numpy())
    np.testing.assert_allclose(scores, np.concatenate(parts), rtol=0, atol=1e-5)
    with pytest.raises(txl.TransformerXLError, match="nothing to predict"):
        loaded.score("x")


def test_what_is_not_there_is_named(tmp_path, trained_run, word_store, capsys):
    assert main(["evaluate", str(tmp_path / "nowhere")]) == 2
    assert "there is no run" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["generate", str(tmp_path / "empty")]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    assert main(["evaluate", str(trained_run), "--data", str(word_store.folder), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "has another vocabulary" in error
    assert error.count("\n") == 1


def test_data_that_moved_is_asked_for(copied):
    folder = RunFolder(copied).chosen_checkpoint()
    about = json.loads((folder / "about.json").read_text())
    loaded = txl.load(copied)
    object.__setattr__(loaded.checkpoint.about, "data", about["data"] + "-gone")
    with pytest.raises(DataError, match="give its new place with `data=`"):
        loaded.store()
