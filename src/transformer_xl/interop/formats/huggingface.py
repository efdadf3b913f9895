"""Hugging Face's TransfoXL (transformers up to 4.35.2) <-> our model: configurations and weights, both ways; and models of ours that transformers
saved. Knows no files.

The weights' names are those of the authors' code (`layout`); what its `config.json` tells in another way than ours is here.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.config.fields import read
from transformer_xl.errors import CheckpointError
from transformer_xl.interop.formats.foreign_model import ForeignModel, check_shapes, shapes_of
from transformer_xl.interop.formats.layout import HUGGINGFACE, SETTINGS, refuse, settings_to, weights_from, weights_to

FIELDS = {
    "vocab_size": "vocabulary",
    **SETTINGS,
    "layer_norm_epsilon": "norm_eps",
    "init_std": "init_std",
    "proj_init_std": "projection_init_std",
    "tie_word_embeddings": "tie_embeddings",
}
"""Names of the same thing, theirs to ours. What is told in another way is in the two functions below."""
OLD_FIELDS = {"n_token": "vocab_size", "tie_weight": "tie_word_embeddings"}
"""What their first releases called them."""
DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "dropatt": 0.0,
    "pre_lnorm": False,
    "init_std": 0.02,
    "proj_init_std": 0.01,
}
"""What they leave unsaid."""

FREQUENCIES = HUGGINGFACE.frequencies
SAVED_PREFIX = "transformer."
"""What `huggingface.TransformerXLForCausalLM` calls the model inside it."""


def model_from_huggingface(theirs: Mapping[str, Tensor], config: ModelConfig, told: Mapping[str, Any]) -> ForeignModel:
    """`config` was made of `told`, the content of their `config.json`."""
    segment = told.get("tgt_len")
    return ForeignModel(
        kind="huggingface",
        model=config,
        weights=weights_from_huggingface(theirs, config),
        segment=segment if type(segment) is int else None,
        rules={
            "initial_memory": "zeros that are attended to, as Hugging Face computes",
            "same_length_keys": "memory, as Hugging Face computes",
            "clusters": "in the order of the paper",
        },
    )


def model_from_saved(theirs: Mapping[str, Tensor], config: ModelConfig) -> ForeignModel:
    """A model of ours that transformers saved, after its Trainer perhaps: our own names, behind one of its."""
    weights = {name.removeprefix(SAVED_PREFIX): value for name, value in theirs.items()}
    check_shapes(shapes_of(weights), config)
    return ForeignModel(kind="transformers", model=config, weights=weights)


def config_from_huggingface(theirs: Mapping[str, object]) -> ModelConfig:
    """The content of a `config.json`."""
    renamed = {new: theirs[old] for old, new in OLD_FIELDS.items() if old in theirs}
    told = {**DEFAULTS, **renamed, **theirs}
    needed = [*FIELDS, "cutoffs", "clamp_len", "untie_r", "tie_projs"]
    if missing := [name for name in needed if name not in told]:
        raise CheckpointError(f"the configuration has no {missing[0]}; it is not one of Hugging Face's TransfoXL")
    if told.get("attn_type", 0) != 0:
        raise CheckpointError(f"attn_type: {told['attn_type']} exists in no release of TransfoXL; only 0 does")
    for name, kind in {"clamp_len": int, "untie_r": bool, "pre_lnorm": bool, "div_val": int}.items():
        if type(told[name]) is not kind:
            raise CheckpointError(f"{name}: {str(told[name])[:40]!r} is no {kind.__name__}")
    fields = {
        **{ours: told[name] for name, ours in FIELDS.items()},
        "cutoffs": told["cutoffs"],
        "clamp_len": max(0, told["clamp_len"]),  # type: ignore[call-overload]
        "share_biases": not told["untie_r"],
        "norm": "pre" if told["pre_lnorm"] else "post",
        "initial_memory": "zeros",
        "projections": "needed" if told["div_val"] == 1 else "always",
        "tie_projections": told["tie_projs"],
    }
    return read(ModelConfig, fields, name="model")


def config_to_huggingface(config: ModelConfig) -> dict[str, object]:
    """What their `config.json` says of this model. A model that TransfoXL cannot compute is refused; dropout of single sites, which only training
    has, is not carried over."""
    _check_expressible(config)
    return {
        "model_type": "transfo-xl",
        "architectures": ["TransfoXLLMHeadModel"],
        **{theirs: getattr(config, ours) for theirs, ours in FIELDS.items()},
        **settings_to(config),
        "untie_r": not config.share_biases,
        "pre_lnorm": config.norm == "pre",
        "attn_type": 0,
        "adaptive": True,
    }


def weights_from_huggingface(theirs: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A state for `TransformerXL(config)`."""
    return weights_from(theirs, config, HUGGINGFACE)


def weights_to_huggingface(ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Their state, as their `model.safetensors` holds it."""
    _check_expressible(config)
    return weights_to(ours, config, HUGGINGFACE)


def _check_expressible(config: ModelConfig) -> None:
    """Refuses what TransfoXL cannot compute."""
    wrong = {
        "encoding": config.encoding != "relative",
        "initial_memory": config.memory > 0 and config.initial_memory != "zeros",
        "frequencies": config.frequencies != "float32",
    }
    refuse(config, whose="Hugging Face's TransfoXL", wrong=wrong)
