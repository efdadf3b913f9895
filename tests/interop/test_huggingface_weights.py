"""Hugging Face's numbers from Hugging Face's weights, and the way back without a bit lost."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foreign import found, name_of
from small_models import build
from transformer_xl.config import ModelConfig
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.interop.formats.huggingface import (
    FREQUENCIES,
    config_from_huggingface,
    config_to_huggingface,
    weights_from_huggingface,
    weights_to_huggingface,
)
from transformer_xl.model import TransformerXL

VARIANTS = found("hf/*")


def checkpoint(variant: Path, kind: str) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    folder = variant / kind
    config = config_from_huggingface(json.loads((folder / "config.json").read_text()))
    if kind == "bin":
        return config, torch.load(folder / "pytorch_model.bin", weights_only=True)
    return config, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
@pytest.mark.parametrize("kind", ["bin", "safetensors"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-7)])
def test_losses_are_theirs(variant, kind, dtype, tolerance):
    config, theirs = checkpoint(variant, kind)
    model = TransformerXL(config)
    model.load_state_dict(weights_from_huggingface(theirs, config), strict=True)
    model.to(dtype).eval()
    inputs = np.load(variant / "expected.npz")
    expected = np.load(variant / ("expected.npz" if dtype == torch.float32 else "expected64.npz"))
    memory = None
    for segment in range(int(inputs["n_segments"])):
        tokens_BT, targets_BT = (torch.from_numpy(inputs[f"seg{segment}_{what}"]) for what in ("input", "target"))
        with torch.no_grad():
            output = model(tokens_BT, targets_BT=targets_BT, memory=memory)
            last_BV = model.log_probabilities(output.hidden_BTD[:, -1])
        memory = output.memory
        for ours, name in ((output.loss_BT, "nll"), (last_BV, "last_logprobs")):
            wanted = torch.from_numpy(expected[f"seg{segment}_{name}"])
            torch.testing.assert_close(ours, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_their_checkpoint_comes_back_as_it_was(variant):
    config, theirs = checkpoint(variant, "safetensors")
    back = weights_to_huggingface(weights_from_huggingface(theirs, config), config)
    assert back.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(back[name], value) or name == FREQUENCIES, name
    torch.testing.assert_close(back[FREQUENCIES], theirs[FREQUENCIES])
    told = json.loads((variant / "safetensors" / "config.json").read_text())
    written = config_to_huggingface(config)
    assert {name: written[name] for name in written.keys() & told.keys()} == {
        name: told[name] for name in written.keys() & told.keys()
    }


SHAPES = {
    "plain softmax": {},
    "pre-norm, own biases": {"norm": "pre", "share_biases": False, "clamp_len": 3, "norm_eps": 1e-12},
    "untied tables": {"tie_embeddings": False, "d_embed": 6},
    "narrow, partly tied": {"cutoffs": (4, 8), "d_embed": 6, "tie_projections": (False, True, False)},
    "div_val 2": {"cutoffs": (4, 8), "div_val": 2, "projections": "always", "tie_projections": (False, True, True)},
    "div_val 2, untied": {"cutoffs": (4, 8), "div_val": 2, "projections": "always", "tie_embeddings": False},
    "same length": {"same_length": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_our_model_comes_back_as_it_was(shape):
    model = build(initial_memory="zeros", **SHAPES[shape])
    theirs = weights_to_huggingface(model.state_dict(), model.config)
    assert len({value.untyped_storage().data_ptr() for value in theirs.values()}) == len(theirs)
    config = config_from_huggingface(json.loads(json.dumps(config_to_huggingface(model.config))))
    for name, value in model.config.__dict__.items():
        if name not in ("d_embed", "projections", "tie_projections"):  # told in full there
            assert getattr(config, name) == value, name
    back = weights_from_huggingface(theirs, config)
    assert back.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(back[name], value), name


def test_wrong_checkpoints_are_refused_by_name():
    config = build(initial_memory="zeros", cutoffs=(4, 8)).config
    theirs = weights_to_huggingface(build(initial_memory="zeros", cutoffs=(4, 8)).state_dict(), config)
    wrong = {
        "crit.cluster_bias": {name: value for name, value in theirs.items() if name != "crit.cluster_bias"},
        "crit.strange": {**theirs, "crit.strange": torch.zeros(1)},
        "crit.out_layers.0.weight": {**theirs, "crit.out_layers.0.weight": torch.zeros(13, 8)},
        "layers.1.inner.bias": {**theirs, "transformer.layers.1.pos_ff.CoreNet.0.bias": torch.zeros(3)},
        FREQUENCIES: {**theirs, FREQUENCIES: torch.zeros(4)},
    }
    cut = {**theirs, FREQUENCIES: theirs[FREQUENCIES][:3]}
    for name, state in [*wrong.items(), (FREQUENCIES, cut)]:
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            weights_from_huggingface(state, config)
    with pytest.raises(CheckpointError, match="2 layers for a file of 0 tensors"):
        weights_to_huggingface({}, config)
    told = config_to_huggingface(config)
    with pytest.raises(CheckpointError, match="untie_r"):
        config_from_huggingface({name: value for name, value in told.items() if name != "untie_r"})
    with pytest.raises(CheckpointError, match="attn_type: 2"):
        config_from_huggingface({**told, "attn_type": 2})


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("initial_memory", {"initial_memory": "empty"}),
        ("same_length_keys", {"same_length": True, "same_length_keys": "memory+1"}),
        ("encoding", {"encoding": "shaw", "learned_positions": 4}),
        ("final_norm", {"norm": "pre", "final_norm": True}),
        ("projections", {"cutoffs": (4, 8), "div_val": 2}),
        ("auxiliary_targets", {"auxiliary_targets": 1}),
    ],
)
def test_what_they_cannot_compute_is_refused(field, changes):
    config = replace(build(initial_memory="zeros").config, **changes)
    with pytest.raises(ConfigError, match=f"model.{field}"):
        config_to_huggingface(config)
