"""The authors' PyTorch models and NVIDIA's, which keep the same settings: their settings -> our configuration, and back for the authors'. Knows no files."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.config.fields import read
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.interop.formats.layout import ORIGINAL, copies, weights_to

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
SETTINGS = (*FIELDS, "attn_type", "clamp_len", "pre_lnorm")
EPS = 1e-5
"""torch's own, where a file does not say."""


def config_from_settings(
    settings: Mapping[str, Any], weights: Mapping[str, Tensor], *, same_length_keys: str
) -> ModelConfig:
    """Conventions that the settings leave unsaid: memory starts empty, and `same_length_keys` differs between the two."""
    if missing := [name for name in SETTINGS if name not in settings]:
        raise CheckpointError(f"the model's settings have no {missing[0]}; it is no Transformer-XL of that code")
    if type(settings["attn_type"]) is not int or settings["attn_type"] not in ENCODINGS:
        raise CheckpointError(f"attn_type: {str(settings['attn_type'])[:20]} is unknown; there are 0, 1, 2 and 3")
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
            " such a model can be used with memory 0 only, give `memory=0`"
        )
    return read(ModelConfig, fields, name="model")


def constructor_arguments(config: ModelConfig, *, segment: int, context: int) -> dict[str, object]:
    """What their MemTransformerLM is made with. A model that it cannot compute is refused; dropout of single sites, which only training has, is not
    carried over."""
    _check_expressible(config)
    if config.learned_positions:  # their table has a row for each position that they were told of
        segment = config.learned_positions - config.memory - context
        if segment < 1:
            raise ConfigError(
                f"model.learned_positions: {config.learned_positions} leave no segment beside memory {config.memory} and context {context},"
                " and the authors' code makes its table as long as the three together"
            )
    attn_type = {name: number for number, name in ENCODINGS.items()}[config.encoding]
    return {
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
        "d_embed": config.embedding_width,
        "cutoffs": list(config.cutoffs),
        "tie_projs": list(config.tie_projections) or [False] * config.clusters,
        "pre_lnorm": config.norm != "post",
        "tgt_len": segment,
        "ext_len": context,
        "attn_type": attn_type,
        "clamp_len": config.clamp_len or -1,
        "sample_softmax": -1,
    }


def state_to_original(ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """What their `load_state_dict` takes: a tensor that they keep under several names is one tensor under each."""
    theirs = weights_to(ours, config, ORIGINAL)
    if config.frequencies == "float16":
        theirs[ORIGINAL.frequencies] = theirs[ORIGINAL.frequencies].half()
    for copy, source in copies(config, ORIGINAL):
        if copy.startswith(("crit.out_layers.", "crit.out_projs.")):
            theirs[copy] = theirs[source]
    return theirs


def _check_expressible(config: ModelConfig) -> None:
    absolute = config.encoding in ("absolute", "per_layer")
    projected = config.div_val > 1 or config.embedding_width != config.d_model
    refused = {
        "encoding": config.encoding not in ENCODINGS.values(),
        "share_biases": not config.share_biases,
        "norm": config.norm not in ("post", "pre_keys" if absolute else "pre"),
        "final_norm": config.final_norm,
        "norm_eps": config.norm_eps != EPS,
        "initial_memory": config.memory > 0 and config.initial_memory != "empty",
        "same_length_keys": config.same_length and config.same_length_keys != "memory",
        "projections": any(config.has_projection(i) != projected for i in range(config.clusters)),
        "d_model": config.encoding == "per_layer" and config.d_model != config.n_head * config.d_head,
        "auxiliary_targets": config.auxiliary_targets > 0,
    }
    for field, wrong in refused.items():
        if wrong:
            raise ConfigError(
                f"model.{field}: the authors' code has no {getattr(config, field)!r} in such a model; change it, or keep the model in our own format"
            )
