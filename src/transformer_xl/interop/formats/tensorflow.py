"""The authors' TensorFlow models: variables by name -> our configuration and weights. Knows no files.

A checkpoint has no settings of its own: every size is read from the shapes of its variables, and only what no shape can tell (lengths, rates)
comes from elsewhere. Kernels are [in, out] there and [out, in] here; TensorFlow's slots of Adam have the shapes and names of their variables.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.config.fields import read
from transformer_xl.errors import CheckpointError, ImportRefused, TransformerXLError
from transformer_xl.interop.formats.foreign_model import (
    ForeignModel,
    Lengths,
    OptimiserState,
    check_shapes,
    momenta,
    shapes_of,
    steps_taken,
    whole,
)

EPS = 1e-12
SLOTS = {"exp_avg": "/Adam", "exp_avg_sq": "/Adam_1"}
LAYER_KERNELS = {
    "rel_attn/o/kernel": "attention_output.weight",
    "ff/layer_1/kernel": "inner.weight",
    "ff/layer_2/kernel": "outer.weight",
}
LAYER_VECTORS = {
    "rel_attn/LayerNorm/gamma": "attention_norm.weight",
    "rel_attn/LayerNorm/beta": "attention_norm.bias",
    "ff/layer_1/bias": "inner.bias",
    "ff/layer_2/bias": "outer.bias",
    "ff/LayerNorm/gamma": "feed_forward_norm.weight",
    "ff/LayerNorm/beta": "feed_forward_norm.bias",
}


TOLD = {"n_layer": "n_layer", "d_model": "d_model", "n_head": "n_head", "d_head": "d_head", "vocab_size": "vocabulary"}
"""What a config.json beside the variables says of their sizes, theirs to ours."""


def model_from_variables(
    variables: Mapping[str, Tensor], *, told: Mapping[str, Any], told_in: Path | None, lengths: Lengths
) -> ForeignModel:
    """`told` is the content of a config.json beside the variables, where there is one."""
    theirs = model_variables(variables)
    names = {"mem_len": "memory", "same_length": "same_length", "dropout": "dropout", "dropatt": "attention_dropout"}
    settings = {ours: told[name] for name, ours in names.items() if name in told}
    clamp = told.get("clamp_len", -1)
    config = config_from_variables(theirs, {**settings, "clamp_len": max(0, clamp) if type(clamp) is int else clamp})
    for name, ours in TOLD.items():
        if name in told and told[name] != getattr(config, ours):
            raise ImportRefused(
                f"{told_in}: {name} is {str(told[name])[:20]} where the checkpoint has {getattr(config, ours)}; it is another model's"
            )
    config = lengths.given_to(config)
    weights = weights_from_variables(theirs, config)
    stepped = variables.get("global_step")
    step = steps_taken(stepped.item(), "global_step") if stepped is not None and stepped.numel() == 1 else 0
    evaluation = {"segment": "test_tgt_len", "memory": "test_mem_len", "clamp_len": "test_clamp_len"}
    optimiser = _adam(variables, config, step)
    rules = {
        "sizes": "from the shapes of the variables",
        "initial_memory": "zeros that are attended to, as that code computes",
        "same_length_keys": "memory+1, as that code counts",
        "clusters": "in the order of the paper",
        "norm_eps": "1e-12, which that code has",
    }
    if isinstance(optimiser, OptimiserState):
        rules["adam"] = (
            "its epsilon, 1e-8, is added before the correction for the first steps there and after it here, which is the same but for those steps"
        )
    return ForeignModel(
        kind="tensorflow",
        model=config,
        weights=weights,
        segment=whole(told.get("tgt_len")),
        step=step,
        evaluation={ours: told[name] for ours, name in evaluation.items() if whole(told.get(name)) is not None},
        optimiser=optimiser,
        rules=rules,
    )


def model_variables(variables: Mapping[str, Tensor], slot: str = "") -> dict[str, Tensor]:
    """Those of the model, or one of Adam's slots for each, without the scope they stand in."""
    scopes = {name.removesuffix("r_w_bias") for name in variables if re.search(r"(^|/)r_w_bias$", name)}
    if len(scopes) != 1:
        raise CheckpointError("the checkpoint has no variable r_w_bias, or several; it is none of the authors' models")
    scope = scopes.pop()
    inside = {name.removeprefix(scope): value for name, value in variables.items() if name.startswith(scope)}
    if slot:
        return {name.removesuffix(slot): value for name, value in inside.items() if name.endswith(slot)}
    return {name: value for name, value in inside.items() if not name.endswith(tuple(SLOTS.values()))}


def config_from_variables(variables: Mapping[str, Tensor], lengths: Mapping[str, Any]) -> ModelConfig:
    """`lengths`: memory, clamp_len, same_length, and dropout rates, as fields of ours."""
    bias = _take(variables, "r_w_bias", axes=(2, 3))
    layers = len({name.split("/")[0] for name in variables if re.match(r"layer_\d+/", name)})
    tails = sum(bool(re.match(r"adaptive_softmax/cutoff_(\d+)/b$", name)) for name in variables)
    sizes = [_take(variables, f"adaptive_softmax/cutoff_{i}/b", axes=(1,)).shape[0] for i in range(tails)]
    sizes = sizes or [_take(variables, "adaptive_softmax/bias", axes=(1,)).shape[0]]
    one_table = "adaptive_embed/lookup_table" in variables
    place = "adaptive_embed/lookup_table" if one_table else "adaptive_embed/cutoff_0/lookup_table"
    width = _take(variables, place, axes=(2,)).shape[1]
    model_width = _take(variables, "layer_0/rel_attn/qkv/kernel", axes=(2,)).shape[0]
    divisor = 1
    if not one_table and len(sizes) > 1:
        divisor = width // max(1, _take(variables, "adaptive_embed/cutoff_1/lookup_table", axes=(2,)).shape[1])
    same = "adaptive_embed/cutoff_0/proj_W" in variables and width == model_width
    fields: dict[str, Any] = {
        "vocabulary": sum(sizes),
        "n_layer": layers,
        "n_head": bias.shape[-2],
        "d_head": bias.shape[-1],
        "d_model": model_width,
        "d_inner": _take(variables, "layer_0/ff/layer_1/kernel", axes=(2,)).shape[1],
        "d_embed": width,
        "cutoffs": [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)],
        "div_val": divisor,
        "share_biases": bias.ndim == 2,
        "norm_eps": EPS,
        "initial_memory": "zeros",
        "same_length_keys": "memory+1",
        "projections": "always" if same else "needed",
        # A projection that the softmax has no variable for is the embedding's own.
        "tie_projections": [f"adaptive_softmax/cutoff_{i}/proj" not in variables for i in range(len(sizes))],
        **lengths,
    }
    return read(ModelConfig, fields, name="model")


def weights_from_variables(variables: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    width, one_table = config.n_head * config.d_head, config.div_val == 1
    left = dict(variables)

    def take(name: str, *, turn: bool = False) -> Tensor:
        if name not in left:
            raise CheckpointError(f"the checkpoint has no variable {name}; it is cut short")
        value = left.pop(name)
        return value.t() if turn and value.ndim == 2 else value

    pairs = (1 if config.share_biases else config.n_layer, config.n_head, config.d_head)
    ours = {}
    for theirs, name in (("r_w_bias", "content_bias_PHK"), ("r_r_bias", "position_bias_PHK")):
        value = take(theirs)
        ours[f"encoding.{name}"] = value[None] if tuple(value.shape) == pairs[1:] else value
    for n in range(config.n_layer):
        fused = take(f"layer_{n}/rel_attn/qkv/kernel", turn=True)
        ours[f"layers.{n}.query.weight"], ours[f"layers.{n}.key_value.weight"] = fused[:width], fused[width:]
        ours[f"encoding.relative_key.{n}.weight"] = take(f"layer_{n}/rel_attn/r/kernel", turn=True)
        for theirs, name in LAYER_KERNELS.items():
            ours[f"layers.{n}.{name}"] = take(f"layer_{n}/{theirs}", turn=True)
        for theirs, name in LAYER_VECTORS.items():
            ours[f"layers.{n}.{name}"] = take(f"layer_{n}/{theirs}")
    for i in range(1 if one_table else config.clusters):
        place = "adaptive_embed" if one_table else f"adaptive_embed/cutoff_{i}"
        ours[f"vocabulary.tables.{i}"] = take(f"{place}/lookup_table")
        if config.has_projection(i):
            ours[f"vocabulary.input_projections.{i}"] = take(f"{place}/proj_W", turn=True)
    for i in range(config.clusters):
        if config.has_projection(i) and not config.ties_projection(i):
            ours[f"vocabulary.output_projections.{i}"] = take(f"adaptive_softmax/cutoff_{i}/proj", turn=True)
    if config.cutoffs:
        ours["vocabulary.bias_V"] = torch.cat([take(f"adaptive_softmax/cutoff_{i}/b") for i in range(config.clusters)])
        ours["vocabulary.tail_weight_CE"] = take("adaptive_softmax/cutoff_0/cluster_W")
        ours["vocabulary.tail_bias_C"] = take("adaptive_softmax/cutoff_0/cluster_b")
    else:
        ours["vocabulary.bias_V"] = take("adaptive_softmax/bias")
    if left:
        raise CheckpointError(f"{min(left)} belongs to no Transformer-XL of the authors' TensorFlow code")
    check_shapes(shapes_of(ours), config)
    return ours


def _adam(variables: Mapping[str, Tensor], config: ModelConfig, step: int) -> OptimiserState | str | None:
    found: dict[str, Tensor] = {}
    for kind, slot in SLOTS.items():
        theirs = model_variables(variables, slot)
        if not theirs:
            return None
        try:
            ours = weights_from_variables(theirs, config)
        except TransformerXLError as error:
            return f"its {kind} does not fit the weights ({error})"
        found |= momenta(ours, kind=kind, step=step)
    return OptimiserState(name="adam", step=step, tensors=found)


def _take(variables: Mapping[str, Tensor], name: str, *, axes: tuple[int, ...]) -> Tensor:
    if name not in variables:
        raise CheckpointError(f"the checkpoint has no variable {name}; it is cut short, or no Transformer-XL")
    if variables[name].ndim not in axes:
        raise CheckpointError(f"{name} has {variables[name].ndim} axes where {axes[0]} belong")
    return variables[name]
