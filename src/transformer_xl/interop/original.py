"""The authors' PyTorch models and NVIDIA's, which keep the same settings: their settings -> our configuration. Knows no files."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.config.fields import read
from transformer_xl.errors import CheckpointError

ENCODINGS = {0: "relative", 1: "shaw_biased", 2: "absolute", 3: "per_layer"}
"""Their attn_type."""
FIELDS = {
    "n_token": "vocabulary",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "d_model": "d_model",
    "d_head": "d_head",
    "d_inner": "d_inner",
    "d_embed": "d_embed",
    "div_val": "div_val",
    "mem_len": "memory",
    "same_length": "same_length",
    "cutoffs": "cutoffs",
    "tie_weight": "tie_embeddings",
    "tie_projs": "tie_projections",
    "dropout": "dropout",
    "dropatt": "attention_dropout",
}
EPS = 1e-5
"""torch's own, where a file does not say."""


def config_from_settings(
    settings: Mapping[str, Any], weights: Mapping[str, Tensor], *, same_length_keys: str
) -> ModelConfig:
    """Conventions that the settings leave unsaid: memory starts empty, and `same_length_keys` differs between the two."""
    needed = (*FIELDS, "attn_type", "clamp_len", "pre_lnorm")
    if missing := [name for name in needed if name not in settings]:
        raise CheckpointError(f"the model's settings have no {missing[0]}; it is no Transformer-XL of that code")
    if settings["attn_type"] not in ENCODINGS:
        raise CheckpointError(f"attn_type: {settings['attn_type']} is unknown; there are 0, 1, 2 and 3")
    if type(settings["clamp_len"]) is not int or type(settings["pre_lnorm"]) is not bool:
        raise CheckpointError(
            "clamp_len or pre_lnorm of the model's settings is of another type than its code gives it"
        )
    encoding = ENCODINGS[settings["attn_type"]]
    absolute = encoding in ("absolute", "per_layer")
    learned = weights["r_emb"].shape[1] if "r_emb" in weights and weights["r_emb"].ndim > 1 else 0
    stored = weights.get("pos_emb.inv_freq")
    fields = {
        **{ours: settings[theirs] for theirs, ours in FIELDS.items()},
        "norm_eps": settings.get("norm_eps", EPS),
        "clamp_len": 0 if encoding == "per_layer" else max(0, settings["clamp_len"]),
        "encoding": encoding,
        "learned_positions": learned if encoding in ("shaw_biased", "per_layer") else 0,
        "frequencies": "float16" if stored is not None and stored.dtype == torch.float16 else "float32",
        "norm": ("pre_keys" if absolute else "pre") if settings["pre_lnorm"] else "post",
        "same_length_keys": same_length_keys,
        "projections": "needed" if settings["div_val"] == 1 else "always",
    }
    if absolute and fields["memory"]:
        raise CheckpointError(
            f"mem_len: {settings['mem_len']} with attn_type {settings['attn_type']}, whose positions start anew in every segment;"
            " such a model can be used with memory 0 only, give --memory 0"
        )
    return read(ModelConfig, fields, name="model")
