"""An import is an ordinary run: it generates, scores, goes on training, is exported and imported again, and says where it came from."""

import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import transformer_xl as txl
from foreign import FIXTURES, ORIGINAL, found, name_of, needs_many
from small_models import build
from transformer_xl.checkpoint import load_checkpoint, read_training_state
from transformer_xl.cli import main
from transformer_xl.config import ModelConfig
from transformer_xl.data.text.tokenizers import load_tokenizer
from transformer_xl.files import digest
from transformer_xl.interop.asking import contents_of
from transformer_xl.interop.formats.foreign_model import Lengths
from transformer_xl.interop.formats.huggingface import config_to_huggingface, weights_to_huggingface
from transformer_xl.interop.importing import import_run, read_vocabulary_file
from transformer_xl.model import TransformerXL


def huggingface_folder(folder: Path, config: ModelConfig, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_to_huggingface(config)))
    save_file(weights_to_huggingface(weights, config), folder / "model.safetensors")
    return folder


def test_an_import_is_an_ordinary_run(tmp_path, capsys):
    source, run = ORIGINAL / "zip" / "model.pt", tmp_path / "run"
    assert main(["import", str(source), "--out", str(run), "--memory", "20"]) == 0
    shown = capsys.readouterr().out
    assert "6,411" in shown
    assert f"txl generate {run}" in shown
    loaded = txl.load(run)
    assert loaded.config.evaluation.memory == 20
    assert loaded.tokenizer.token(0) == "<eos>"
    assert len(loaded.score("the , the .\n").nats) == 5
    assert loaded.generate("the", tokens=5)
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["kind"] == "original"
    assert {file["name"]: file["sha256"] for file in provenance["files"]}["model.pt"] == digest(source)
    assert main(["evaluate", str(run)]) == 2
    assert "no data came with it" in capsys.readouterr().err
    assert main(["import", str(source), "--out", str(run)]) == 2
    assert "exists already" in capsys.readouterr().err


@needs_many
@pytest.mark.parametrize("variant", ["c-adaptive-div2", "i-era2019"])
def test_adams_momenta_land_at_their_weights(variant, tmp_path):
    """The momentum of a weight is cut and turned as the weight itself is."""
    source = FIXTURES / "original" / variant / "legacy"
    import_run(source, tmp_path / "run", lengths=Lengths())
    checkpoint = load_checkpoint(tmp_path / "run")
    ours = read_training_state(checkpoint.folder).tensors
    for name, parameter in checkpoint.model.named_parameters():
        assert ours[f"optimiser.exp_avg.{name}"].shape == parameter.shape
        assert float(ours[f"optimiser.step.{name}"]) == 3.0
    raw = contents_of({"optimiser": source / "optimizer.pt"}, scratch=tmp_path)["optimiser"].tensors["optimiser"]
    order = json.loads((source.parent / "about.json").read_text())["optimizer_parameter_order"]
    theirs = {name: raw[f"{number}.exp_avg"] for number, name in enumerate(order)}
    fused = theirs["layers.1.dec_attn.qkv_net.weight"]
    width = len(fused) // 3
    assert torch.equal(ours["optimiser.exp_avg.vocabulary.tail_weight_CE"], theirs["crit.cluster_weight"].flip(0))
    assert torch.equal(ours["optimiser.exp_avg.layers.1.key_value.weight"], fused[width:])
    assert torch.equal(ours["optimiser.exp_avg.vocabulary.tables.0"], theirs["word_emb.emb_layers.0.weight"])


@needs_many
def test_training_goes_on_from_an_imported_optimiser(tmp_path):
    """With data of a vocabulary as large as the model's, which stands in for the lost one of the model."""
    source, run, data = ORIGINAL / "zip" / "model.pt", tmp_path / "run", tmp_path / "data"
    text = FIXTURES / "original" / "c-adaptive-div2" / "data" / "train.txt"
    assert main(["prepare", str(text), "--tokenizer", "word", "--vocab-size", "91", "--out", str(data)]) == 0
    import_run(source, run, lengths=Lengths(), vocabulary=data)
    words = ["train", str(run / "config.json"), "--data", str(data), "--run", str(run)]
    assert main([*words, "--training.steps", "5"]) == 0
    state = read_training_state(run / "checkpoints" / "step-00000005")
    assert float(state.tensors["optimiser.step.layers.0.query.weight"]) == 5.0


@pytest.mark.parametrize("source", found("hf/*/bin"), ids=name_of)
def test_import_export_import_keeps_every_bit(source, tmp_path):
    assert main(["import", str(source), "--out", str(tmp_path / "first")]) == 0
    out = ["--to", "huggingface", "--out", str(tmp_path / "exported")]
    assert main(["export", str(tmp_path / "first"), *out]) == 0
    assert main(["import", str(tmp_path / "exported"), "--out", str(tmp_path / "second")]) == 0
    first, second = (load_checkpoint(tmp_path / name) for name in ("first", "second"))
    assert (first.folder / "model.safetensors").read_bytes() == (second.folder / "model.safetensors").read_bytes()
    assert first.config.model == second.config.model
    assert first.tokenizer.words == second.tokenizer.words


def test_a_model_without_a_vocabulary_speaks_in_numbers(tmp_path):
    config = build(initial_memory="zeros").config
    folder = huggingface_folder(tmp_path / "theirs", config, build(initial_memory="zeros").float().state_dict())
    imported = import_run(folder, tmp_path / "run", lengths=Lengths())
    assert "no vocabulary was found" in imported.vocabulary.reason
    loaded = txl.load(tmp_path / "run")
    assert loaded.tokenizer.encode("3 1 2").tolist() == [3, 1, 2]
    assert loaded.tokenizer.decode([3, 1]) == "3 1 "
    assert len(loaded.score("3 1 2").nats) == 3
    assert all(0 <= int(word) < config.vocabulary for word in loaded.generate("1", tokens=4).split())


def test_a_text_file_can_be_the_vocabulary(tmp_path, capsys):
    config = build(initial_memory="zeros").config
    folder = huggingface_folder(tmp_path / "theirs", config, build(initial_memory="zeros").float().state_dict())
    words = ["<eos>", *(f"word{n}" for n in range(config.vocabulary - 1))]
    (folder / "words.txt").write_text("\n".join(words) + "\n")
    command = ["import", str(folder), "--vocabulary", str(folder / "words.txt")]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    assert txl.load(tmp_path / "run").tokenizer.token(3) == "word2"
    (folder / "words.txt").write_text("\n".join(words[:-1]) + "\n")
    assert main([*command, "--out", str(tmp_path / "other")]) == 2
    assert f"{config.vocabulary - 1} symbols where the model has {config.vocabulary}" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_vocabulary_of_267735_words_is_read(tmp_path):
    chance = random.Random(0)
    words = ["<eos>", *(f"w{chance.randrange(10**9)}-{n}" for n in range(267_734))]
    numbers = OrderedDict((word, number) for number, word in enumerate(words))
    value = {"counter": Counter(numbers), "idx2sym": words, "sym2idx": numbers, "lower_case": False}
    for protocol in (2, 4):
        path = tmp_path / f"{protocol}.pkl"
        path.write_bytes(pickle.dumps(value, protocol=protocol))
        chosen = read_vocabulary_file(path, scratch=tmp_path / f"scratch-{protocol}")
        assert chosen.tokenizer.words == words
    chosen.tokenizer.save(tmp_path)
    begun = time.process_time()
    load_tokenizer(tmp_path)
    assert time.process_time() - begun < 1  # as promised


@pytest.mark.slow
def test_a_checkpoint_of_285_million_parameters_is_imported(tmp_path):
    """WikiText-103 large as Hugging Face keeps it, with random weights, in less than a minute and 4 GB."""
    from transformer_xl.presets import find_preset

    config = find_preset("wikitext-103-large").run.model
    config = replace(config, initial_memory="zeros", same_length_keys="memory", vocabulary=267_735, share_biases=False)
    with torch.device("meta"):
        shapes = TransformerXL(config).state_dict()
    weights = {name: torch.randn(value.shape) * 0.02 for name, value in shapes.items()}
    folder = huggingface_folder(tmp_path / "theirs", config, weights)
    begun = time.monotonic()
    command = [sys.executable, "-m", "transformer_xl", "import", str(folder), "--out", str(tmp_path / "run"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as importing:
        told = json.loads(importing.stdout.read())
        _, status, used = os.wait4(importing.pid, 0)
        importing.returncode = status
    seconds, gigabytes = time.monotonic() - begun, used.ru_maxrss / 1e6
    assert status == 0
    assert told["parameters"] > 250_000_000
    back = load_file(load_checkpoint(tmp_path / "run").folder / "model.safetensors")
    assert torch.equal(back["layers.3.query.weight"], weights["layers.3.query.weight"])
    print(f"{told['parameters']:,} parameters in {seconds:.1f} s, {gigabytes:.2f} GB")
    assert seconds < 60
    assert gigabytes < 4
