"""The estimate of memory beside what a step really takes."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tile_cases import interpreter
from transformer_xl import native
from transformer_xl.cli import main
from transformer_xl.config import ModelConfig, RunConfig, TrainingConfig
from transformer_xl.model import TransformerXL
from transformer_xl.presets import find_preset
from transformer_xl.training.footprint import footprint_of, per_lane

MEASURE = """
import sys, torch
from dataclasses import replace
from transformer_xl.model import TransformerXL
from transformer_xl.presets import find_preset
from transformer_xl.training.optimisation import build_optimiser

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def steps(run, lanes):
    model = TransformerXL(run.model).train()
    model.recompute = run.training.checkpoint_activations
    optimiser, memory = build_optimiser(model, run.training), None
    for _ in range(3):
        tokens = torch.randint(200, (lanes, run.training.segment + 1))
        optimiser.zero_grad(set_to_none=True)
        output = model(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=memory)
        output.loss_BT.mean().backward()
        optimiser.step()
        memory = output.memory

name, lanes, recompute = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
run = find_preset(name).run
steps(find_preset("demo").run, 1)  # libraries, threads and kernels are no part of the estimate
before = status("VmRSS")
steps(replace(run, training=replace(run.training, checkpoint_activations=recompute)), lanes)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "lanes"), [("enwik8-12l", 4), ("wikitext-103-standard", 8)])
def test_two_presets_take_what_was_estimated(name, lanes, recompute):
    run = find_preset(name).run
    run = replace(run, training=replace(run.training, lanes=lanes))
    told = subprocess.run(
        [sys.executable, "-c", MEASURE, name, str(lanes), str(recompute)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},  # or the C library keeps much of what was given back
        capture_output=True,
        text=True,
        check=True,
    )
    measured, estimated = int(told.stdout), footprint_of(run, recompute=recompute).total
    print(
        f"{name}, {lanes} lanes, recompute {recompute}: measured {measured / 1e9:.2f} GB, estimated {estimated / 1e9:.2f}"
    )
    assert estimated == pytest.approx(measured, rel=0.12)


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_keeps_the_numbers_that_are_counted(kernels, dropout, monkeypatch):
    """What autograd saves for one layer more, weights left out; norms also keep a mean and a deviation for each token."""
    if not kernels:
        monkeypatch.setattr(native, "usable", lambda like: False)
    (three, config), (two, _) = (kept(layers, dropout) for layers in (3, 2))
    relative_keys = 128 * 4 * 24 if kernels else 0  # once for all lanes
    counted = LANES * per_lane(config, T=TOKENS, by="native" if kernels else "torch")
    assert three - two == pytest.approx(counted + relative_keys, rel=0.02)


@pytest.mark.processes
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_on_a_card_keeps_the_numbers_that_are_counted(dropout):
    pytest.importorskip("triton", reason="there is no Triton here")
    with interpreter() as interpreted:
        (three, config), (two, _) = (interpreted(kept_by_a_card, layers, dropout) for layers in (3, 2))
    relative_keys = 128 * 4 * 24
    assert three - two == pytest.approx(LANES * per_lane(config, T=TOKENS, by="triton") + relative_keys, rel=0.02)


def kept_by_a_card(layers: int, dropout: float) -> tuple[int, ModelConfig]:
    chosen = patch("transformer_xl.model.transformer.backend_of", lambda *_, **__: "triton")
    with patch.object(native, "usable", lambda like: False), chosen:
        return kept(layers, dropout)


LANES, TOKENS = 2, 48


def kept(layers: int, dropout: float) -> tuple[int, ModelConfig]:
    """Numbers, and of which model."""
    sizes = {"d_model": 64, "n_head": 4, "d_head": 24, "d_inner": 200}
    config = ModelConfig(vocabulary=300, n_layer=layers, memory=80, dropout=dropout, **sizes)
    model = TransformerXL(config).train()
    tokens, memory = torch.randint(300, (LANES, TOKENS + 1)), None
    for _ in range(2):
        memory = model(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=memory).memory
    weights = {weight.data_ptr() for weight in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in weights and tensor.is_floating_point():
            saved[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=memory)
    return sum(tensor.untyped_storage().nbytes() // 4 for tensor in saved.values()), config


def test_lanes_dealt_to_devices_take_less_each():
    run = RunConfig(
        model=ModelConfig(vocabulary=100, n_layer=2, d_model=16, n_head=2, d_head=8, d_inner=32, memory=8),
        training=TrainingConfig(lanes=8, segment=8),
    )
    alone, ddp, fsdp = footprint_of(run), footprint_of(run, devices=4), footprint_of(run, devices=4, parallel="fsdp")
    assert ddp.activations * 4 == alone.activations == fsdp.activations * 4
    assert ddp.memory * 4 == alone.memory
    assert fsdp.weights < ddp.weights
    assert footprint_of(run, recompute=True).activations < alone.activations


def test_the_table_and_its_json_say_the_same(capsys):
    assert main(["presets", "--memory", "--devices", "4", "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    assert main(["presets", "--memory", "--devices", "4", "--device", "cuda", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (line,) = [line for line in shown.splitlines() if line.strip().startswith("lm1b-large ")]
    ways = told["bytes"]["lm1b-large"]
    figures = [ways["ddp"][part] for part in ("weights", "memory", "activations", "total")]
    figures += [ways[way]["total"] for way in ("ddp recomputing", "fsdp", "fsdp recomputing")]
    assert line.split() == ["lm1b-large", "128", *(f"{figure / 1e9:.2f}" for figure in figures)]


@pytest.mark.parametrize(
    ("words", "sentence"), [(["--devices", "2"], "are for --memory"), (["--memory", "--devices", "0"], "too few")]
)
def test_wrong_words_about_memory_are_one_sentence(words, sentence, capsys):
    assert main(["presets", *words]) == 2
    assert sentence in capsys.readouterr().err
