"""Weights come from files that anybody may have written: one floating type for all, every number finite, or a sentence that names the tensor.

Checksums are right throughout, as they are for whoever writes a file on purpose.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import transformer_xl as txl
from transformer_xl.checkpoint import RunFolder, load_checkpoint
from transformer_xl.checkpoint.folder import CHECKSUMS
from transformer_xl.cli import main
from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.files import digest


def put(folder: Path, name: str, data: bytes, *, gone: str = "") -> None:
    """`gone`: the file that it stands in place of."""
    (folder / name).write_bytes(data)
    told = {**json.loads((folder / CHECKSUMS).read_text()), name: digest(folder / name)}
    told.pop(gone, None)
    (folder / CHECKSUMS).write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")


@pytest.fixture
def rewritten(trained_run, tmp_path) -> Callable[[Callable[[str, Tensor], Tensor]], Path]:
    def rewrite(change: Callable[[str, Tensor], Tensor]) -> Path:
        folder = Path(shutil.copytree(RunFolder(trained_run).chosen_checkpoint(), tmp_path / "checkpoint"))
        weights = load_file(folder / "model.safetensors")
        save_file({name: change(name, value).contiguous() for name, value in weights.items()}, tmp_path / "changed")
        put(folder, "model.safetensors", (tmp_path / "changed").read_bytes())
        return folder

    return rewrite


def with_nan(value: Tensor, number: float = float("nan")) -> Tensor:
    changed = value.clone()
    changed.view(-1)[-1] = number
    return changed


BIAS, MATRIX = "vocabulary.bias_V", "layers.1.query.weight"
WRONG = {
    "all but a bias": (lambda name, value: value if name == BIAS else value.double(), rf"{BIAS} holds float32"),
    "a bias": (lambda name, value: value.double() if name == BIAS else value, rf"{BIAS} holds float64"),
    "matrices": (
        lambda name, value: value.half() if value.dim() == 2 and name.startswith("layers.") else value,
        r"layers.0.attention_output.weight holds float16 where float32",
    ),
    "a whole bias": (lambda name, value: value.int() if name == BIAS else value, rf"{BIAS} holds I32"),
    "whole numbers": (
        lambda name, value: value.long(),
        r"encoding.content_bias_PHK holds int64; weights may be float32, float64, float16",
    ),
    "eight bits": (
        lambda name, value: value.to(torch.float8_e4m3fn),
        r"encoding.content_bias_PHK holds F8_E4M3; weights may be",
    ),
    "not a number": (lambda name, value: with_nan(value) if name == MATRIX else value, rf"{MATRIX} holds numbers that"),
    "infinite": (lambda name, value: with_nan(value, float("-inf")) if name == MATRIX else value, rf"{MATRIX} holds"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_weights_of_other_or_several_types_or_not_finite_are_refused_by_name(wrong, rewritten, capsys):
    change, said = WRONG[wrong]
    folder = rewritten(change)
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {said}"):
        load_checkpoint(folder)
    assert main(["generate", str(folder), "--tokens", "3"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_all_of_another_floating_type_work(dtype, rewritten, trained_run):
    loaded, exact = txl.load(rewritten(lambda name, value: value.to(dtype))), txl.load(trained_run)
    text = "def decode(self, text):\n" * 4
    assert loaded.model.vocabulary.bias_V.dtype == dtype
    assert abs(loaded.score(text).total_bits / exact.score(text).total_bits - 1) < 0.01
    assert loaded.generate("def ", tokens=20, temperature=0) == loaded.generate("def ", tokens=20, temperature=0)
    assert loaded.evaluate(split="valid", tokens=100).loss_nats > 0


def test_weights_at_odd_addresses_give_the_same_numbers(trained_run, rewritten):
    """Nothing in the format keeps a header from having an odd length, and mapped numbers then stand where no program expects them."""
    folder = rewritten(lambda name, value: value)
    data = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].rstrip() + b" " * (1 + -len(data[8:end].rstrip()) % 4)
    put(folder, "model.safetensors", len(header).to_bytes(8, "little") + header + data[end:])
    loaded, exact = txl.load(folder), txl.load(trained_run)
    assert all(value.data_ptr() % 4 == 0 for value in loaded.model.state_dict().values())
    assert (loaded.score("class A:\n" * 9).nats[1:] == exact.score("class A:\n" * 9).nats[1:]).all()


def test_no_text_and_no_figure_comes_of_numbers_that_are_not_finite(rewritten):
    """Each weight is finite, what they give together is not: no token is the likeliest of such, and none may drop out of a mean unseen."""
    loaded = txl.load(rewritten(lambda name, value: value * 1e38 if name.startswith("layers.") else value))
    for ask in (
        lambda: loaded.generate("def ", tokens=3),
        lambda: loaded.likeliest("def ", tokens=3),
        lambda: loaded.score("def f(): pass"),
        lambda: loaded.evaluate(split="valid", tokens=100),
    ):
        with pytest.raises(InputError, match="the model computes numbers that are not finite"):
            ask()


def test_json_nested_without_end_is_refused(rewritten):
    folder = rewritten(lambda name, value: value)
    put(folder, "about.json", b"[" * 100_000)
    with pytest.raises(CheckpointError, match=r"about.json is not JSON"):
        load_checkpoint(folder)
    table = json.loads((folder / "config.json").read_text())
    table["model"]["dropout"] = 10**400
    put(folder, "config.json", json.dumps(table).encode())
    with pytest.raises(CheckpointError, match=r"config.json: model.dropout: .* larger than any number"):
        load_checkpoint(folder)
