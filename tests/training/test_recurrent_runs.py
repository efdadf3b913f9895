"""A recurrent model through the same commands: trained, stopped and resumed, evaluated, generating, scored."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from small_run import SMALL
from transformer_xl.cli import main
from transformer_xl.config import EvaluationConfig, RecurrentConfig, RunConfig
from transformer_xl.library import load
from transformer_xl.training import train


def config(cell: str, **training: object) -> RunConfig:
    return replace(
        SMALL,
        model=RecurrentConfig(vocabulary=256, cell=cell, n_layer=2, d_model=16, d_hidden=20, dropout=0.1),  # type: ignore[arg-type]
        training=replace(SMALL.training, schedule="constant", **training),  # type: ignore[arg-type]
        evaluation=EvaluationConfig(segment=12),
    )


@pytest.fixture(scope="module", params=["lstm", "qrnn"])
def run(request, byte_store, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent") / request.param
    train(config(request.param), store=byte_store, folder=folder, command="txl train")
    return folder


def test_resumed_training_gives_the_same_bits(run, byte_store, tmp_path):
    cell = run.name
    train(config(cell, steps=10), store=byte_store, folder=tmp_path / "again", command="")
    train(config(cell), store=byte_store, folder=tmp_path / "again", command="")
    one, other = (
        load_file(folder / "checkpoints/step-00000020/model.safetensors") for folder in (run, tmp_path / "again")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_evaluates_in_one_stream_with_its_rule_in_words(run, capsys):
    assert main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    loaded = load(run)
    tokens = torch.from_numpy(np.asarray(loaded.store().split("test").tokens, dtype=np.int64))[None]
    with torch.inference_mode():
        expected = loaded.model(tokens[:, :-1], targets_BT=tokens[:, 1:]).loss_BT.mean().item()
    assert found["loss_nats"] == pytest.approx(expected, abs=1e-5)
    assert "the state carried from token to token" in found["rule_in_words"]


def test_generates_and_scores(run, capsys):
    assert main(["generate", str(run), "--prompt", "def ", "--tokens", "20", "--seed", "1"]) == 0
    first = capsys.readouterr().out
    assert main(["generate", str(run), "--prompt", "def ", "--tokens", "20", "--seed", "1"]) == 0
    assert capsys.readouterr().out == first
    loaded = load(run)
    assert len(loaded.likeliest("def ", tokens=5, beams=2)) == 2
    assert loaded.score("some text of bytes").nats.shape == (18,)
    model_card = (run / "README.md").read_text()
    assert f"A recurrent ({run.name}) language model" in model_card


def test_refuses_lengths_of_attention_in_a_sentence(run, capsys):
    for words in (["--memory", "64"], ["--sweep", "0,64"], ["--lanes", "4"], ["--weights", "int8"]):
        assert main(["evaluate", str(run), *words]) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("txl: ")
    assert main(["generate", str(run), "--memory", "64"]) == 2
    assert "is for attention" in capsys.readouterr().err


def test_reads_back_its_own_configuration_and_words_change_it(run, byte_store, capsys):
    words = ["train", str(run / "config.json"), "--data", str(byte_store.folder), "--print_config"]
    assert main([*words, "--model.weight_dropout", "0.3"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["weight_dropout"] == 0.3
    for field in ("n_head", "memory"):  # one that it does not have, and one that it has for all time
        assert main([*words, f"--model.{field}", "3"]) == 2
        assert f"no field model.{field}" in capsys.readouterr().err
