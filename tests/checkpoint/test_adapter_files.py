"""An adapter's file may come from anybody: what was not trained beside these very weights is refused by name, before anything is added."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_weights_from_files import put

import transformer_xl as txl
from transformer_xl.checkpoint import RunFolder, load_checkpoint
from transformer_xl.checkpoint.adapter_file import Adapter, fingerprint, read_adapter, write_adapter
from transformer_xl.cli import main
from transformer_xl.errors import CheckpointError
from transformer_xl.model.adapters import factor_shapes, merged
from transformer_xl.tensor_files import write_tensors

QUERY = "layers.0.query.adapter.up_OR"


@pytest.fixture(scope="module")
def base(trained_run) -> Path:
    return RunFolder(trained_run).chosen_checkpoint()


def made(base: Path, *, rank: int = 2, size: float = 0.1) -> Adapter:
    model = load_checkpoint(base).model
    generator = torch.Generator().manual_seed(0)
    shapes = factor_shapes(model, rank=rank)
    factors = {name: size * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return Adapter(base=fingerprint(model.state_dict()), rank=rank, corpus="novel", step=7, factors=factors)


@pytest.fixture
def path(base, tmp_path) -> Path:
    write_adapter(tmp_path / "adapter.safetensors", made(base))
    return tmp_path / "adapter.safetensors"


def header(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return {name: value for name, value in file.metadata().items() if name != "sha256"}


def test_what_is_read_is_what_was_written_and_is_added(base, path):
    loaded, plain, wrote = txl.load(base, adapter=path), load_checkpoint(base), made(base)
    found = loaded.checkpoint.adapter
    assert (found.base, found.rank, found.corpus, found.step) == (wrote.base, 2, "novel", 7)
    assert all(torch.equal(found.factors[name], factor) for name, factor in wrote.factors.items())
    weights = merged({**plain.model.state_dict(), **wrote.factors})
    assert weights.keys() == loaded.model.state_dict().keys()
    assert all(torch.equal(loaded.model.state_dict()[name], weight) for name, weight in weights.items())
    assert not torch.equal(weights["layers.0.query.weight"], plain.model.state_dict()["layers.0.query.weight"])
    text = "def decode(self, text):\n"
    assert loaded.score(text).total_bits != txl.load(base).score(text).total_bits


def test_the_same_weights_elsewhere_are_the_same_base(base, path, tmp_path):
    assert main(["export", str(base), "--to", "safetensors", "--out", str(tmp_path / "copy")]) == 0
    assert txl.load(tmp_path / "copy", adapter=path).checkpoint.adapter.step == 7


def test_another_base_is_refused(base, path, recurrent_run, tmp_path, capsys):
    folder = Path(shutil.copytree(base, tmp_path / "other"))
    weights = load_file(folder / "model.safetensors")
    weights["vocabulary.bias_V"][3] += 1e-3
    save_file(weights, folder / "model.safetensors")
    put(folder, "model.safetensors", (folder / "model.safetensors").read_bytes())
    for other in (folder, recurrent_run):
        with pytest.raises(CheckpointError, match="was trained beside other weights than these; give the run"):
            txl.load(other, adapter=path)
        for words in (["generate"], ["evaluate"], ["score", "-"], ["export", "--to", "safetensors"]):
            out = ["--out", str(tmp_path / "out")] if words[0] == "export" else []
            assert main([words[0], str(other), *words[1:], *out, "--adapter", str(path)]) == 2
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert "other weights" in said


WRONG_HEADERS = {
    "kind": ("engine", "is not an adapter, as training makes one; give the adapter.safetensors of a run"),
    "rank": ("3", "layers.0.attention_output.adapter.down_RI has shape"),
    "step": ("-1", "step is '-1' in its header, which is no whole number"),
    "base": ("0" * 64, "other weights"),
    "more": ("x", "has a field more in its header that is none of ours"),
}


@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_headers_that_lie_are_refused(name, base, path):
    value, said = WRONG_HEADERS[name]
    write_tensors(path, load_file(path), metadata={**header(path), name: value})
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(base, adapter=path)


@pytest.mark.parametrize("rank", ["", "0", "17", "8" * 30, "٣", "1e2", " 2"])
def test_ranks_that_are_none_are_refused(rank, base, path):
    write_tensors(path, load_file(path), metadata={**header(path), "rank": rank})
    with pytest.raises(CheckpointError, match=r"rank is .* which is no whole number|rank \d+, where the narrowest"):
        load_checkpoint(base, adapter=path)


WRONG_TENSORS = {
    "one is missing": (lambda factors: factors.pop(QUERY), f"lacks the tensor {QUERY}"),
    "one too many": (lambda factors: factors.update(x=torch.zeros(1)), "has a tensor x that this model does not know"),
    "wide": (lambda factors: factors.update({QUERY: torch.zeros(16, 3)}), r"has shape \[16, 3\]"),
    "of halves": (lambda factors: factors.update({QUERY: factors[QUERY].half()}), "holds float16 where float32"),
    "not a number": (lambda factors: factors[QUERY].fill_(float("nan")), "numbers that are not finite"),
    "too large together": (
        lambda factors: [factor.fill_(3e38) for factor in factors.values()],
        "with it layers.0.query.weight holds numbers that are not finite",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_tensors_that_do_not_fit_are_refused(wrong, base, path):
    change, said = WRONG_TENSORS[wrong]
    factors = load_file(path)
    change(factors)
    write_tensors(path, factors, metadata=header(path))
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(base, adapter=path)


def test_other_files_are_refused(base, path, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist; there should be an adapter"):
        load_checkpoint(base, adapter=tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is not an adapter"):
        load_checkpoint(base, adapter=base / "model.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(base, adapter=base / "config.json")
    with pytest.raises(CheckpointError, match=r"is no plain file|cannot be read"):
        load_checkpoint(base, adapter=tmp_path)


def test_no_byte_changes_unseen(base, path):
    """Whichever byte of the file is another, it is refused, or is still the same adapter."""
    model, plain, chance = load_checkpoint(base).model, path.read_bytes(), random.Random(0)
    wrote = made(base)
    places = [*range(0, 400), *(chance.randrange(len(plain)) for _ in range(200))]
    for place in places:
        data = bytearray(plain)
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        try:
            found = read_adapter(path, model=model, base=wrote.base)
        except CheckpointError:
            continue
        assert all(torch.equal(found.factors[name], factor) for name, factor in wrote.factors.items()), place
        assert (found.rank, found.step) == (2, 7), place
