"""What the owner of an old checkpoint does next: text of his own in the model's tokens, evaluation, training; and what becomes of files that do not fit."""

import json
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from foreign import FIXTURES, HERE, ORIGINAL, TENSORFLOW, found, needs_many
from transformer_xl.checkpoint import load_checkpoint, read_training_state
from transformer_xl.cli import main
from transformer_xl.data.store import open_store
from transformer_xl.interop import importing
from transformer_xl.interop.formats.foreign_model import Lengths
from transformer_xl.interop.importing import import_run

KINDS = {
    "original": found("original/c-adaptive-div2/legacy", "original/a-plain/zip")[0],
    "huggingface": found("hf/div4-untied-r/bin", "hf/div1-tied-r/bin")[0],
    "nvidia": FIXTURES / "nvidia" / "n3-adaptive-div4" / "checkpoint_last.pt",
    "tensorflow": TENSORFLOW / "model.ckpt",
}
if FIXTURES is HERE:
    del KINDS["nvidia"]  # the one beside the tests knows 70 bytes, and no words


def own_text(run: Path, path: Path) -> Path:
    """Text that somebody might have: words that the model knows, and some that it does not where it has a word for those."""
    tokenizer = load_checkpoint(run).tokenizer
    tokens = np.random.default_rng(0).integers(0, tokenizer.size, 2000)
    strange = "unheard of\n" if getattr(tokenizer, "unknown", None) is not None else ""
    path.write_text(strange + tokenizer.decode(tokens))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_from_file_to_figures_and_text(kind, tmp_path, capsys):
    run, data = str(tmp_path / "run"), str(tmp_path / "data")
    words = ["--memory", "8", "--segment", "8"] if kind == "tensorflow" else []
    assert main(["import", str(KINDS[kind]), "--out", run, *words]) == 0
    text = own_text(tmp_path / "run", tmp_path / "mine.txt")
    capsys.readouterr()
    assert main(["prepare", str(text), "--tokenizer-of", run, "--out", data]) == 0
    assert main(["evaluate", run, "--data", data, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.split("documents\n")[1].split("\n", 3)[3])
    assert figures["corpus"] == "mine.txt"
    assert figures["tokens"] > 50
    assert np.isfinite(figures["perplexity"])
    prompt = "1" if kind == "tensorflow" else "the"
    assert main(["generate", run, "--prompt", prompt, "--tokens", "12"]) == 0
    assert len(capsys.readouterr().out.split()) >= 10


def test_text_is_encoded_as_the_model_knows_it(tmp_path, capsys):
    run, data = tmp_path / "run", tmp_path / "data"
    import_run(KINDS["original"], run, lengths=Lengths())
    text = own_text(run, tmp_path / "mine.txt")
    words = ["prepare", str(text), "--tokenizer-of", str(run), "--out", str(data)]
    assert main([*words, "--split", "1"]) == 0
    store, tokenizer = open_store(data), load_checkpoint(run).tokenizer
    np.testing.assert_array_equal(store.split("train").tokens, tokenizer.encode(text.read_text() + "\n"))
    assert "existed before" in store.manifest.rule
    again = [
        "prepare",
        str(text),
        "--tokenizer-of",
        str(data),
        "--out",
        str(tmp_path / "again"),
    ]  # a store has one, too
    assert main([*again, "--split", "1"]) == 0
    np.testing.assert_array_equal(open_store(tmp_path / "again").split("train").tokens, store.split("train").tokens)
    capsys.readouterr()
    assert main([*words, "--tokenizer", "word"]) == 2
    assert "--tokenizer makes a new tokenizer" in capsys.readouterr().err
    assert main(["prepare", str(text), "--tokenizer-of", str(tmp_path / "nothing"), "--out", str(data)]) == 2
    assert "there is no run" in capsys.readouterr().err
    assert main(["prepare", "python", "--tokenizer-of", str(run), "--out", str(data)]) == 2
    assert "--tokenizer-of does not apply to python" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["original", "huggingface"])
def test_training_goes_on_with_lanes_of_its_own(kind, tmp_path, capsys):
    """With the optimiser's state that came along, or a new one; once begun, the lanes stay."""
    run, data = tmp_path / "run", tmp_path / "data"
    imported = import_run(KINDS[kind], run, lengths=Lengths())
    text = own_text(run, tmp_path / "mine.txt")
    assert main(["prepare", str(text), "--tokenizer-of", str(run), "--out", str(data)]) == 0
    words = ["train", str(run / "config.json"), "--data", str(data), "--run", str(run)]
    steps = imported.step + 2
    assert main([*words, "--training.steps", str(steps), "--training.lanes", "3", "--training.seed", "5"]) == 0
    assert "training.lanes 16 -> 3" in capsys.readouterr().err
    state = read_training_state(run / "checkpoints" / f"step-{steps:08d}")
    assert float(state.tensors["optimiser.step.layers.0.query.weight"]) == steps
    assert state.tensors["memory.0.layer_0"].shape[0] == 3
    assert main([*words, "--training.steps", str(steps + 1), "--training.lanes", "4"]) == 2
    assert "training.lanes 3 -> 4" in capsys.readouterr().err


def test_an_optimiser_that_came_along_stays(tmp_path, capsys):
    run, data = tmp_path / "run", tmp_path / "data"
    import_run(KINDS["original"], run, lengths=Lengths())
    text = own_text(run, tmp_path / "mine.txt")
    assert main(["prepare", str(text), "--tokenizer-of", str(run), "--out", str(data)]) == 0
    words = ["train", str(run / "config.json"), "--data", str(data), "--run", str(run)]
    assert main([*words, "--training.steps", "5", "--training.optimiser", "sgd"]) == 2
    assert "training.optimiser adam -> sgd" in capsys.readouterr().err


def test_half_precision_optimisers_are_left_behind_and_it_is_said(tmp_path, monkeypatch, capsys):
    """apex keeps its own object in optimizer.pt; the model is imported all the same."""
    module = types.ModuleType("apex.fp16_utils.loss_scaler")
    module.DynamicLossScaler = type("DynamicLossScaler", (), {"__module__": module.__name__})
    for name in ("apex", "apex.fp16_utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    scaler = module.DynamicLossScaler()
    scaler.cur_scale = 65536.0
    folder = tmp_path / "theirs"
    shutil.copytree(ORIGINAL / "zip", folder)
    state = {"loss_scaler": scaler, "dynamic_loss_scale": True, "overflow": False, "first_closure_call_this_step": True}
    state |= {"optimizer_state_dict": {"state": {}, "param_groups": []}, "fp32_from_fp16": [[torch.zeros(3)]]}
    torch.save(state, folder / "optimizer.pt")
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    assert "left out: it is apex's, with weights of its own" in capsys.readouterr().out
    provenance = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert provenance["optimiser"].startswith("left out")


@needs_many
def test_a_cache_one_folder_up_may_be_another_models(tmp_path, capsys):
    """Beside the model it must be the model's; one folder up it is passed over, and that is said."""
    folder, other = tmp_path / "work" / "model", FIXTURES / "original" / "b-adaptive-div1" / "cache.pt"
    shutil.copytree(ORIGINAL / "zip", folder)
    shutil.copy(other, tmp_path / "work" / "cache.pt")
    assert main(["import", str(folder), "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    assert "181 symbols where this one has 91" in shown.err
    assert "no vocabulary was found" in shown.out
    provenance = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert {file["name"] for file in provenance["files"]} == {"model.pt", "optimizer.pt"}
    shutil.copy(other, folder / "cache.pt")
    assert main(["import", str(folder), "--out", str(tmp_path / "second")]) == 2
    assert "give the right one with --vocabulary" in capsys.readouterr().err


def test_where_tensorflows_adam_differs_is_written_down(tmp_path, monkeypatch):
    """A checkpoint of training has two slots for each variable; those of the fixtures were saved without."""
    folder = TENSORFLOW
    contents = importing.contents_of({"bundle": folder / "model.ckpt.index"}, scratch=tmp_path)["bundle"]
    variables = contents.tensors["model"]
    for slot in ("Adam", "Adam_1"):
        variables |= {
            f"{name}/{slot}": value.abs() for name, value in contents.tensors["model"].items() if "Adam" not in name
        }
    variables["global_step"] = torch.tensor(40)
    monkeypatch.setattr(importing, "contents_of", lambda files, scratch: {"bundle": contents})
    imported = import_run(folder, tmp_path / "run", lengths=Lengths())
    assert imported.optimiser == "adam, after 40 steps"
    provenance = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert "epsilon" in provenance["rules"]["adam"]
    state = read_training_state(load_checkpoint(tmp_path / "run").folder)
    assert float(state.tensors["optimiser.step.layers.0.query.weight"]) == 40


@pytest.mark.parametrize("adapter", [[], ["--adapter", "rank=2"]])
@pytest.mark.parametrize("kind", KINDS)
def test_another_run_begins_with_its_weights(kind, adapter, tmp_path, capsys):
    theirs, data, run = tmp_path / "theirs", tmp_path / "data", tmp_path / "run"
    lengths = Lengths(memory=8, segment=8) if kind == "tensorflow" else Lengths()
    import_run(KINDS[kind], theirs, lengths=lengths)
    text = own_text(theirs, tmp_path / "mine.txt")
    assert main(["prepare", str(text), "--tokenizer-of", str(theirs), "--out", str(data)]) == 0
    begin = ["train", "--from", str(theirs), *adapter, "--data", str(data), "--run", str(run)]
    assert main([*begin, "--training.lanes", "3", "--training.segment", "8", "--training.steps", "4"]) == 0
    shown = capsys.readouterr()
    assert "mine.txt valid: " in shown.out
    assert "came without its text: what was lost on that is not known" in shown.err
    state = read_training_state(run / "checkpoints" / "step-00000004")
    counts = {float(value) for name, value in state.tensors.items() if name.startswith("optimiser.step.")}
    assert max(counts) <= 4  # a new optimiser, whatever came along
    if adapter:
        given = ["generate", str(theirs), "--adapter", str(run / "adapter.safetensors"), "--tokens", "5"]
        assert main([*given, "--prompt", "1" if kind == "tensorflow" else "the"]) == 0
