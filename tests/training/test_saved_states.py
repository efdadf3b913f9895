"""Training states come from files that anybody may have written: all of it is checked before any of it is used, and whoever is wrong is named."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from small_run import SMALL
from transformer_xl.checkpoint import RunFolder
from transformer_xl.checkpoint.folder import CHECKSUMS
from transformer_xl.config import TrainingConfig
from transformer_xl.errors import CheckpointError
from transformer_xl.files import digest
from transformer_xl.model import build_model
from transformer_xl.training import train
from transformer_xl.training.optimisation import build_optimiser
from transformer_xl.training.resuming import start_or_resume

pytestmark = pytest.mark.usefixtures("without_pictures")
CONFIG = replace(
    SMALL,
    training=replace(SMALL.training, steps=4, validate_every=0, log_every=3, average="ema", accumulation=2),
)
MOMENT, SQUARES = "optimiser.exp_avg.layers.0.query.weight", "optimiser.exp_avg_sq.layers.0.query.weight"


@pytest.fixture(scope="module")
def run(byte_store, tmp_path_factory, without_pictures):
    folder = tmp_path_factory.mktemp("state") / "run"
    train(CONFIG, store=byte_store, folder=folder)
    return folder


@pytest.fixture
def resume(run, byte_store, tmp_path):
    """Resumes from a copy of the run with some tensors and values changed; None leaves one out."""
    copy = RunFolder(shutil.copytree(run, tmp_path / "run"))
    folder = copy.checkpoint_at(4)
    good_tensors = {name: value.clone() for name, value in load_file(folder / "training.safetensors").items()}
    good_values = json.loads((folder / "training.json").read_text())

    def resumed(tensors=None, values=None):
        changed, table = {**good_tensors, **(tensors or {})}, {**good_values, **(values or {})}
        save_file(
            {name: value.contiguous() for name, value in changed.items() if value is not None},
            folder / "training.safetensors",
        )
        (folder / "training.json").write_text(json.dumps({k: v for k, v in table.items() if v != "left out"}))
        told = json.loads((folder / CHECKSUMS).read_text())
        told |= {name: digest(folder / name) for name in ("training.safetensors", "training.json")}
        (folder / CHECKSUMS).write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
        return start_or_resume(copy, CONFIG, store=byte_store, resume="auto", device=torch.device("cpu"))

    resumed.tensors, resumed.values = good_tensors, good_values
    return resumed


def with_value(tensor, value):
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


TENSORS = {
    "memory.0.valid": [
        (lambda t: with_value(t, 2**33), "memory.0: memory: valid is 8589934592 in a memory of 12"),
        (lambda t: with_value(t, -(2**40)), "memory.0: memory: valid is -1099511627776"),
        (lambda t: t.int(), "memory.0.valid holds I32, which nothing"),
        (lambda t: t[:1], r"memory.0.valid has shape \[1\]"),
    ],
    "memory.1.layer_1": [
        (lambda t: t[:, 1:], r"memory.1.layer_1 has shape \[2, 11, 16\]"),
        (lambda t: t.double(), "memory.1.layer_1 holds float64"),
        (lambda t: t * float("inf"), "memory.1.layer_1 holds numbers that are not finite"),
        (lambda t: None, "lacks the tensor memory.1.layer_1"),
    ],
    "memory.0.starts_full": [(lambda t: ~t, "memory.0.starts_full is True, and model.initial_memory says otherwise")],
    MOMENT: [
        (lambda t: t.T[:1], rf"{MOMENT} has shape \[1, 16\]"),
        (lambda t: t.bfloat16(), f"{MOMENT} holds bfloat16"),
        (lambda t: t * float("nan"), f"{MOMENT} holds numbers that are not finite"),
        (lambda t: None, f"lacks the tensor {MOMENT}"),
    ],
    SQUARES: [(lambda t: with_value(t, -1e-9), f"{SQUARES} is negative")],
    "optimiser.step.vocabulary.bias_V": [(lambda t: t - 99, "optimiser.step.vocabulary.bias_V is negative")],
    "weights.vocabulary.bias_V": [(lambda t: None, "lacks the tensor weights.vocabulary.bias_V")],
    "random.cpu": [
        (lambda t: t[:-1], r"random.cpu has shape \[5055\]"),
        (lambda t: t.float(), "random.cpu holds float32 where uint8"),
        (lambda t: torch.full_like(t, 255), "random.cpu is no state of a random generator"),
        (lambda t: None, "lacks the tensor random.cpu"),
    ],
    "random.cpu.1": [(lambda t: torch.get_rng_state(), "has a tensor random.cpu.1")],
    "optimiser.momentum.vocabulary.bias_V": [(lambda t: torch.zeros(256), "has a tensor optimiser.momentum")],
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_this_run_cannot_have_saved_are_refused_by_name(name, resume):
    for change, said in TENSORS[name]:
        with pytest.raises(CheckpointError, match=rf"training.safetensors.* {said}"):
            resume({name: change(resume.tensors.get(name))})


VALUES = {
    "step": [3, -1, 2.5, True, None, 10**30, "left out"],
    "tokens": [-1, "many", 2**60],
    "seconds": [-0.5, float("nan"), float("inf"), 10**400],
    "skipped": [5, -1],
    "rate_scale": [float("nan"), 2.0, -0.1],
    "best_nats": [float("nan"), -1.0, "low"],
    "average_count": [9, -1, 0],
    "window": [None, {"nats": float("nan")}, {"tokens": 7, "steps": 0}, {"norm": float("inf")}, {"stepz": 1}],
    "ranks": [0, 2, 10**9, "two"],
    "lanes": ["left out", None, [], {"kind": "lanes"}],
    "scaler": ["left out", None, {"scale": 1.0}],
    "more": [1],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_this_run_cannot_have_saved_are_refused_by_name(name, resume):
    for value in VALUES[name]:
        with pytest.raises(CheckpointError, match=r"training\.(json|safetensors)") as refused:
            resume(values={name: value})
        assert name in str(refused.value) or (name, value) in (("average_count", 0), ("ranks", 2))


def test_places_in_the_data_that_cannot_be_are_refused(resume):
    lanes = resume.values["lanes"]
    for change in ({"offset": -5}, {"offset": 10**6}, {"epoch": "1"}, {"generator": {"bit_generator": "PCG64"}}):
        with pytest.raises(CheckpointError, match=r"training.json: lanes: the saved position"):
            resume(values={"lanes": {**lanes, **change}})


def test_a_state_as_it_was_saved_goes_on(resume):
    assert resume().step == 4


def test_weights_of_another_type_are_not_trained_on(run, byte_store, tmp_path):
    copy = RunFolder(shutil.copytree(run, tmp_path / "run"))
    path = copy.checkpoint_at(4) / "model.safetensors"
    save_file({name: value.half() for name, value in load_file(path).items()}, path)
    told = json.loads((path.parent / CHECKSUMS).read_text())
    (path.parent / CHECKSUMS).write_text(json.dumps({**told, path.name: digest(path)}, indent=2, sort_keys=True) + "\n")
    with pytest.raises(CheckpointError, match=r"model.safetensors: .* holds float16 where float32 is asked for"):
        start_or_resume(copy, CONFIG, store=byte_store, resume="auto", device=torch.device("cpu"))


def test_sgd_moves_a_parameter_whose_first_gradient_comes_late():
    """A tail's weights have none until a word of it is a target; torch's fused step takes momenta for all or for none."""
    model = build_model(SMALL.model)
    optimiser = build_optimiser(model, TrainingConfig(optimiser="sgd", momentum=0.9, learning_rate=0.1))
    late = model.vocabulary.bias_V
    before = late.detach().clone()
    for parameter in model.parameters():
        parameter.grad = None if parameter is late else torch.ones_like(parameter)
    optimiser.step()
    assert torch.equal(late, before)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    np.testing.assert_allclose((before - late).detach().numpy(), 0.1, rtol=1e-6)
