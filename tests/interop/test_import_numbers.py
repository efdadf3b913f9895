"""Imported models compute what the code that wrote them computed: losses, distributions and memory, over segments that follow each other."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from foreign import HERE, found, name_of
from transformer_xl.checkpoint import Checkpoint, load_checkpoint
from transformer_xl.interop.formats.foreign_model import Lengths
from transformer_xl.interop.importing import import_run
from transformer_xl.model import Memory

SOURCES = found(
    *("original/*/zip/model.pt", "original/*/legacy"),
    *("nvidia/*/checkpoint_last.pt", "nvidia/*/legacy/checkpoint_last.pt"),
    *("hf/*/bin", "hf/*/safetensors/model.safetensors"),
)


def imported(source: Path, out: Path) -> Checkpoint:
    import_run(source, out, lengths=Lengths())
    return load_checkpoint(out)


def variant_of(source: Path) -> Path:
    return next(parent for parent in (source, *source.parents) if (parent / "about.json").is_file())


def evaluations(about: dict) -> list[dict]:
    """Which lengths each expected file was computed with; Hugging Face's have the model's own."""
    return about.get("evaluations", [{"files": ["expected.npz", "expected64.npz"]}])


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_losses_distributions_and_memory_are_theirs(source, tmp_path):
    model = imported(source, tmp_path / "run").model
    folder = variant_of(source)
    about = json.loads((folder / "about.json").read_text())
    for evaluation in evaluations(about):
        if "mem_len" in evaluation:
            model.set_lengths(
                memory=evaluation["mem_len"],
                clamp_len=0 if model.config.encoding == "per_layer" else max(0, evaluation["clamp_len"]),
                same_length=evaluation["same_length"],
            )
        single, double = (np.load(folder / name) for name in evaluation["files"])
        for dtype, expected, tolerance in ((torch.float32, single, 5e-6), (torch.float64, double, 1e-7)):
            check(model.to(dtype), single, expected, tolerance, batch_first=about["kind"] == "huggingface")
        model.to(torch.float32)


@torch.no_grad()
def check(model, inputs, expected, tolerance, *, batch_first):
    def wanted(name):
        value = torch.from_numpy(expected[name])
        return value if batch_first or "last" in name else value.transpose(0, 1)

    memory = None
    for segment in range(int(inputs["n_segments"])):
        tokens_BT, targets_BT = (torch.from_numpy(inputs[f"seg{segment}_{what}"]) for what in ("input", "target"))
        if not batch_first:
            tokens_BT, targets_BT = tokens_BT.t(), targets_BT.t()
        output = model(tokens_BT, targets_BT=targets_BT, memory=memory)
        memory = output.memory
        last_BV = model.log_probabilities(output.hidden_BTD[:, -1])
        for ours, name in ((output.loss_BT, f"seg{segment}_nll"), (last_BV, f"seg{segment}_last_logprobs")):
            torch.testing.assert_close(ours, wanted(name), rtol=0, atol=tolerance)
    if "mem_final" in expected:
        for number, layer_BMD in enumerate(memory.layers):
            theirs_BMD = torch.from_numpy(expected["mem_final"][number]).transpose(0, 1)
            torch.testing.assert_close(layer_BMD, theirs_BMD, rtol=0, atol=tolerance)


@torch.no_grad()
@pytest.mark.parametrize("folder", found("tensorflow/*"), ids=name_of)
def test_tensorflow_softmax_and_new_memory_are_theirs(folder, tmp_path):
    about = json.loads((folder / "config.json").read_text())
    checkpoint = imported(folder, tmp_path / "run")
    assert checkpoint.config.evaluation.clamp_len == about["test_clamp_len"]
    model, layers = checkpoint.model, range(about["n_layer"])
    # The expected memory is whole, not yet cut to mem_len.
    model.set_lengths(memory=about["mem_len"] + about["tgt_len"], clamp_len=about["test_clamp_len"])
    given = tuple(torch.from_numpy(np.load(folder / f"memory_{n}.npy")).float() for n in layers)
    memory = Memory(layers=given, valid_B=torch.tensor([given[0].shape[1]]))
    output = model(torch.from_numpy(np.load(folder / "tokens.npy")), memory=memory)
    softmax = model.log_probabilities(output.hidden_BTD).exp()
    torch.testing.assert_close(softmax, torch.from_numpy(np.load(folder / "softmax.npy")), rtol=0, atol=1e-6)
    for number, layer in enumerate(output.memory.layers):
        expected = torch.from_numpy(np.load(folder / f"new_memory_{number}.npy"))
        torch.testing.assert_close(layer, expected, rtol=0, atol=1e-6)


def test_every_kind_is_here_in_every_clone():
    kept = [path for path in HERE.rglob("*") if path.is_file() and path.name != "README.md"]
    assert {path.relative_to(HERE).parts[0] for path in kept} == {"original", "tensorflow", "hf", "nvidia"}
    assert sum(path.stat().st_size for path in kept) < 700_000
    assert not any(b"\ndef " in path.read_bytes() or path.suffix == ".py" for path in kept)
