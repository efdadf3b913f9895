"""Weights in 8 bits: what rounding does to them, the same numbers wherever they are read, and every wrong file refused by name."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors.torch import load_file, save, save_file
from test_weights_from_files import put

import transformer_xl as txl
from transformer_xl.checkpoint import RunFolder, load_checkpoint
from transformer_xl.checkpoint.eight_bits import EIGHT_BITS, SCALE, as_float32, in_eight_bits
from transformer_xl.cli import main
from transformer_xl.errors import CheckpointError
from transformer_xl.tensor_files import reading

LARGEST = 2.0**126  # beyond it, 127 times a scale that was rounded up may be too large


@given(
    arrays(
        np.float32,
        array_shapes(min_dims=1, max_dims=3, max_side=6),
        elements=st.floats(-LARGEST, LARGEST, width=32),
    )
)
def test_a_number_moves_by_half_a_step_of_its_row_at_most(tmp_path_factory, numbers):
    path = tmp_path_factory.mktemp("eight") / EIGHT_BITS
    weight = torch.from_numpy(numbers)
    save_file(in_eight_bits({"w": weight, "a.bias": weight.clone()}), path)
    with reading(path, what="weights") as file:
        found = as_float32(file).tensors()
    assert found.keys() == {"w", "a.bias"}
    assert torch.equal(found["a.bias"], weight)
    if weight.dim() == 1:
        assert torch.equal(found["w"], weight)
        return
    step = weight.abs().amax(dim=-1, keepdim=True).double() / 127
    far = (found["w"].double() - weight.double()).abs()
    assert (far <= 0.5001 * step).logical_or(step < 2.0**-126).all()
    assert (found["w"][(step < 2.0**-126).expand_as(weight)] == 0).all()


def test_read_back_each_number_is_one_rounded_product(trained_run):
    weights = load_checkpoint(trained_run).model.state_dict()
    stored = in_eight_bits(weights)
    rounded = {name for name, value in stored.items() if value.dtype == torch.int8}
    assert {name for name, value in weights.items() if value.dim() > 1 and "bias" not in name} == rounded
    for name in rounded:
        steps, scale = stored[name].numpy(), stored[f"{name}{SCALE}"].numpy()
        assert abs(steps.astype(int)).max() == 127
        exact = steps.astype(np.float64) * scale.astype(np.float64)[..., None]  # 7 and 24 bits: exact in 53
        assert np.array_equal((steps * scale[..., None]).astype(np.float32), exact.astype(np.float32))


@pytest.fixture
def folder(trained_run, tmp_path) -> Path:
    """A checkpoint of the small run, in 8 bits."""
    copied = Path(shutil.copytree(RunFolder(trained_run).chosen_checkpoint(), tmp_path / "checkpoint"))
    change(copied, in_eight_bits(load_file(copied / "model.safetensors")))
    return copied


def change(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    put(
        folder,
        EIGHT_BITS,
        save({name: value.contiguous() for name, value in weights.items()}),
        gone="model.safetensors",
    )


def test_a_checkpoint_in_8_bits_is_a_run_like_any_other(folder, trained_run):
    loaded, exact = txl.load(folder), txl.load(trained_run)
    assert {value.dtype for value in loaded.model.state_dict().values()} == {torch.float32}
    text = "def decode(self, text):\n" * 4
    assert abs(loaded.score(text).total_bits / exact.score(text).total_bits - 1) < 0.01
    assert loaded.generate("def ", tokens=20, temperature=0) == loaded.generate("def ", tokens=20, temperature=0)
    assert loaded.evaluate(split="valid", tokens=100).loss_nats > 0


MATRIX, VECTOR = "layers.1.query.weight", "layers.1.attention_norm.weight"
SCALES = f"{MATRIX}{SCALE}"


def with_first(value: torch.Tensor, number: float) -> torch.Tensor:
    changed = value.clone()
    changed.view(-1)[0] = number
    return changed


WRONG = {
    "no scales": (SCALES, lambda value: None, rf"lacks the tensor {SCALES} that {MATRIX} asks for"),
    "too few scales": (SCALES, lambda value: value[1:], rf"{SCALES} has shape \[15\] where {MATRIX} asks for \[16\]"),
    "one scale for all": (SCALES, lambda value: value[:1].view(()), rf"{SCALES} has shape \[\] where {MATRIX} asks"),
    "scales of another type": (SCALES, lambda value: value.double(), rf"{SCALES} holds float64 where float32 is asked"),
    "scales in 8 bits": (SCALES, lambda value: value.to(torch.int8), rf"{SCALES} holds int8 where float32"),
    "a scale that is not a number": (SCALES, lambda value: with_first(value, float("nan")), rf"{SCALES} holds numbers"),
    "an endless scale": (
        SCALES,
        lambda value: with_first(value, float("inf")),
        rf"{SCALES} holds numbers that are not",
    ),
    "a scale below 0": (SCALES, lambda value: with_first(value, -1e-3), rf"{SCALES} holds numbers below 0"),
    "a scale next to 0": (SCALES, lambda value: with_first(value, 1e-40), rf"{SCALES} holds numbers below 0, or next"),
    "a scale that is too large": (SCALES, lambda value: value * 0 + 1e38, rf"{MATRIX} times its scale is not finite"),
    "-128": (MATRIX, lambda value: with_first(value, -128), rf"{MATRIX} holds -128, where numbers go from -127"),
    "missing rows": (MATRIX, lambda value: value[1:], rf"{SCALES} has shape \[16\] where {MATRIX} asks for \[15\]"),
    "no matrix": (
        MATRIX,
        lambda value: None,
        rf"lacks the tensor {MATRIX} that config.json|has a tensor {SCALES} that",
    ),
    "a matrix in another type": (MATRIX, lambda value: value.to(torch.uint8), rf"{MATRIX} holds uint8 where float32"),
    "a vector in 8 bits": (VECTOR, lambda value: value.to(torch.int8), rf"{VECTOR} holds int8 in shape \[16\]"),
    "a vector of doubles": (
        VECTOR,
        lambda value: value.double(),
        rf"{VECTOR} holds float64 where float32 is asked for",
    ),
    "a vector that is not a number": (
        VECTOR,
        lambda value: with_first(value, float("nan")),
        rf"{VECTOR} holds numbers",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_one_sentence(wrong, folder, capsys):
    name, damage, said = WRONG[wrong]
    weights = load_file(folder / EIGHT_BITS)
    changed = {each: damage(value) if each == name else value for each, value in weights.items()}
    change(folder, {each: value for each, value in changed.items() if value is not None})
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(folder)
    assert main(["generate", str(folder), "--tokens", "3"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_rows_and_scales_that_are_both_too_few(folder):
    weights = load_file(folder / EIGHT_BITS)
    change(folder, {**weights, MATRIX: weights[MATRIX][1:], SCALES: weights[SCALES][1:]})
    with pytest.raises(CheckpointError, match=rf"{MATRIX} has shape \[15, 16\] where config.json asks for \[16, 16\]"):
        load_checkpoint(folder)


def test_scales_that_have_scales(tmp_path):
    scale = torch.ones(2, 3, dtype=torch.int8)
    named = {"w": torch.ones(2, 3, 4, dtype=torch.int8), "w.scale": scale, "w.scale.scale": torch.ones(2)}
    save_file(named, tmp_path / EIGHT_BITS)
    refused = pytest.raises(CheckpointError, match=r"w.scale holds int8 where float32 is asked for")
    with reading(tmp_path / EIGHT_BITS, what="weights") as file, refused:
        as_float32(file)


@pytest.mark.parametrize("kept", [0, 7, 1000, -1])
def test_a_file_that_was_cut_off(kept, folder):
    data = (folder / EIGHT_BITS).read_bytes()
    (folder / EIGHT_BITS).write_bytes(data[:kept])
    with pytest.raises(CheckpointError, match=r"is damaged \(its checksum is another\)"):
        load_checkpoint(folder)
    put(folder, EIGHT_BITS, data[:kept])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(folder)


def test_only_float32_is_rounded():
    with pytest.raises(CheckpointError, match="w holds float64, and only float32 is written in 8 bits"):
        in_eight_bits({"w": torch.zeros(2, 2, dtype=torch.float64)})
