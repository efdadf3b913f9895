"""Somebody else's numbers: weights with the names of the authors' TensorFlow code, and the softmax and memory it computed from them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import Memory, TransformerXL

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures" / "tensorflow"


@pytest.mark.skipif(not FIXTURES.exists(), reason="../shared/fixtures/tensorflow is not here")
@pytest.mark.parametrize("variant", ["keras_txl_div_1", "keras_txl_div_2"])
def test_softmax_and_new_memory_match(variant):
    folder = FIXTURES / variant
    about = json.loads((folder / "config.json").read_text())
    arrays = {
        name.removeprefix("transformer/"): torch.from_numpy(value)
        for name, value in np.load(folder / "weights.npz").items()
    }
    model = TransformerXL(configuration(about))
    model.load_state_dict(state(arrays, model.config), strict=True)
    model.eval()
    layers = tuple(torch.from_numpy(np.load(folder / f"memory_{n}.npy")).float() for n in range(about["n_layer"]))
    memory = Memory(layers=layers, valid_B=torch.tensor([layers[0].shape[1]]))
    with torch.no_grad():
        output = model(torch.from_numpy(np.load(folder / "tokens.npy")), memory=memory)
        softmax = model.log_probabilities(output.hidden_BTD).exp()
    torch.testing.assert_close(softmax, torch.from_numpy(np.load(folder / "softmax.npy")), rtol=0, atol=1e-6)
    for number, layer in enumerate(output.memory.layers):
        expected = torch.from_numpy(np.load(folder / f"new_memory_{number}.npy"))
        torch.testing.assert_close(layer, expected, rtol=0, atol=1e-6)


def configuration(about):
    cutoffs = tuple(about.get("cutoffs", [0, about["vocab_size"]])[1:-1])
    share = about["share_proj"]
    return ModelConfig(
        vocabulary=about["vocab_size"],
        **{name: about[name] for name in ("n_layer", "d_model", "d_embed", "n_head", "d_head", "d_inner")},
        memory=about["mem_len"] + about["tgt_len"],  # the expected memory is whole, not yet cut to mem_len
        clamp_len=about["test_clamp_len"],
        share_biases=not about.get("untie_r", False),
        norm_eps=1e-12,
        cutoffs=cutoffs,
        div_val=about.get("div_val", 1),
        projections="always" if about["proj_same_dim"] else "needed",
        tie_projections=tuple(share) if isinstance(share, list) else (),
    )


def state(arrays, config):
    width = config.n_head * config.d_head
    pairs = (-1, config.n_head, config.d_head)
    result = {
        "encoding.content_bias_PHK": arrays["r_w_bias"].reshape(pairs),
        "encoding.position_bias_PHK": arrays["r_r_bias"].reshape(pairs),
    }
    for n in range(config.n_layer):
        there, here = f"layer_{n}", f"layers.{n}"
        qkv = arrays[f"{there}/rel_attn/qkv/kernel"].T
        result |= {
            f"{here}.query.weight": qkv[:width],
            f"{here}.key_value.weight": qkv[width:],
            f"encoding.relative_key.{n}.weight": arrays[f"{there}/rel_attn/r/kernel"].T,
            f"{here}.attention_output.weight": arrays[f"{there}/rel_attn/o/kernel"].T,
            f"{here}.attention_norm.weight": arrays[f"{there}/rel_attn/LayerNorm/gamma"],
            f"{here}.attention_norm.bias": arrays[f"{there}/rel_attn/LayerNorm/beta"],
            f"{here}.inner.weight": arrays[f"{there}/ff/layer_1/kernel"].T,
            f"{here}.inner.bias": arrays[f"{there}/ff/layer_1/bias"],
            f"{here}.outer.weight": arrays[f"{there}/ff/layer_2/kernel"].T,
            f"{here}.outer.bias": arrays[f"{there}/ff/layer_2/bias"],
            f"{here}.feed_forward_norm.weight": arrays[f"{there}/ff/LayerNorm/gamma"],
            f"{here}.feed_forward_norm.bias": arrays[f"{there}/ff/LayerNorm/beta"],
        }
    if config.clusters == 1:
        return result | {
            "vocabulary.tables.0": arrays["adaptive_embed/lookup_table"],
            "vocabulary.bias_V": arrays["adaptive_softmax/bias"],
        }
    for i in range(config.clusters):
        result[f"vocabulary.tables.{i}"] = arrays[f"adaptive_embed/cutoff_{i}/lookup_table"]
        if config.has_projection(i):
            result[f"vocabulary.input_projections.{i}"] = arrays[f"adaptive_embed/cutoff_{i}/proj_W"].T
    return result | {
        "vocabulary.bias_V": torch.cat([arrays[f"adaptive_softmax/cutoff_{i}/b"] for i in range(config.clusters)]),
        "vocabulary.tail_weight_CE": arrays["adaptive_softmax/cutoff_0/cluster_W"],
        "vocabulary.tail_bias_C": arrays["adaptive_softmax/cutoff_0/cluster_b"],
    }
