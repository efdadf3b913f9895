"""The authors' PyTorch models and NVIDIA's, which keep the same settings: what their files hold -> our terms, and back for the authors'. Knows no files.

Momenta have the shapes of their weights, so that whatever turns weights into ours turns these, too. An optimiser that is none of ours is left out,
and a sentence says why.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig
from transformer_xl.config.fields import read
from transformer_xl.errors import CheckpointError, ConfigError, TransformerXLError
from transformer_xl.interop.formats import layout
from transformer_xl.interop.formats.foreign_model import (
    ForeignModel,
    Lengths,
    OptimiserState,
    momenta,
    steps_taken,
    whole,
    whole_step,
)
from transformer_xl.interop.quarantine.extraction import Contents

ENCODINGS = {0: "relative", 1: "shaw_biased", 2: "absolute", 3: "per_layer"}
"""Their attn_type."""
FIELDS = {
    **layout.SETTINGS,
    **{"n_token": "vocabulary", "cutoffs": "cutoffs", "tie_weight": "tie_embeddings", "tie_projs": "tie_projections"},
}
SETTINGS = (*FIELDS, "attn_type", "clamp_len", "pre_lnorm")
EPS = 1e-5
"""torch's own, where a file does not say."""
MOMENTA = ("exp_avg", "exp_avg_sq", "momentum_buffer")
TORCH_ADAM = {"betas": [0.9, 0.999], "eps": 1e-8, "amsgrad": False}
"""What ours runs with."""
LARGEST_NUMBER = 1e6
"""Of a rate, a weight decay or a momentum."""
Mapped = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def model_from_torch(model: Contents[Tensor], *, optimiser: Contents[Tensor], lengths: Lengths) -> ForeignModel:
    """`optimiser` is the file that holds its state: one of its own, or the model's."""
    settings, theirs = dict(model.facts["model"]), model.tensors.get("model", {})
    if lengths.memory is not None:
        settings["mem_len"] = lengths.memory
    keys, names = ("memory", layout.ORIGINAL) if model.kind == "original" else ("memory+1", layout.NVIDIA)
    config = lengths.given_to(config_from_settings(settings, theirs, same_length_keys=keys))
    weights = layout.weights_from(theirs, config, names)
    arguments = model.facts.get("arguments", {})
    state = None
    if "optimiser" in optimiser.facts:
        state = optimiser_state(
            optimiser.facts["optimiser"],
            optimiser.tensors.get("optimiser", {}),
            order=settings["parameter_order"],
            mapped=lambda tensors: layout.weights_from(tensors, config, names),
            called=arguments.get("optim"),
        )
    step = state.step if isinstance(state, OptimiserState) else steps_taken(settings.get("step", 0), "train_step")
    rules = {
        "initial_memory": "empty, as that code starts",
        "same_length_keys": f"{keys}, as that code counts",
        "clusters": "their rows turned round, for that code has the last tail first",
    }
    if config.learned_positions:
        rules["learned positions"] = "their rows turned round, for that code has the nearest last"
    if config.frequencies == "float16":
        rules["frequencies"] = "rounded to float16, for the file has them so"
    return ForeignModel(
        kind=model.kind,
        model=config,
        weights=weights,
        segment=whole(settings.get("tgt_len")),
        context=whole(settings.get("ext_len")) or 0,
        step=step,
        training=_training_settings(arguments),
        vocabulary=model.facts.get("vocabulary"),
        optimiser=state,
        rules=rules,
    )


def contents_of_export(told: Mapping[str, Any], weights: Contents[Tensor]) -> Contents[Tensor]:
    """Our own export for the authors' code: `told` is what their constructor is given."""
    known = {name: told[name] for name in (*SETTINGS, "tgt_len", "ext_len") if name in told}
    return Contents(kind="original", facts={"model": {**known, "parameter_order": []}}, tensors=weights.tensors)


def config_from_settings(
    settings: Mapping[str, Any], weights: Mapping[str, Tensor], *, same_length_keys: str
) -> ModelConfig:
    """Conventions that the settings leave unsaid: memory starts empty, and `same_length_keys` differs between the two."""
    if missing := [name for name in SETTINGS if name not in settings]:
        raise CheckpointError(f"the model's settings have no {missing[0]}; it is no Transformer-XL of that code")
    if type(settings["attn_type"]) is not int or settings["attn_type"] not in ENCODINGS:
        raise CheckpointError(f"attn_type: {str(settings['attn_type'])[:20]} is unknown; there are 0, 1, 2 and 3")
    if type(settings["clamp_len"]) is not int or type(settings["pre_lnorm"]) is not bool:
        raise CheckpointError("clamp_len or pre_lnorm of its settings is of another type than its code gives it")
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


def _training_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """NVIDIA's command line, as far as ours has the same."""
    names = {"max_step": "steps", "warmup_step": "warm_up", "lr": "learning_rate", "clip": "clip", "seed": "seed"}
    kinds = {"lr": (int, float), "clip": (int, float)}
    found: dict[str, Any] = {}
    for theirs, ours in names.items():
        value = arguments.get(theirs)
        if type(value) in kinds.get(theirs, (int,)) and value is not None and value >= 0:
            found[ours] = float(value) if theirs in kinds else value
    return found


# --- optimisers


def optimiser_state(
    facts: Mapping[str, Any], tensors: Mapping[str, Tensor], *, order: list[str], mapped: Mapped, called: object
) -> OptimiserState | str:
    """`order` names the parameters as the optimiser lists them; `called` is what its settings call it, where they do."""
    if "left_out" in facts:
        return str(facts["left_out"])
    groups = facts["groups"]
    if isinstance(called, str) and called not in ("adam", "adamw", "sgd"):
        return f"{called} is no optimiser of ours"
    if len(groups) != 1 or facts["others"]:
        return "it has several groups of parameters, or fields that ours has not"
    group = groups[0]
    name = _name(group)
    if name is None:
        return "it is neither Adam with torch's own settings nor SGD"
    if facts["parameters"] != len(order):
        return f"it is for {facts['parameters']} parameters where the model has {len(order)}"
    steps = set(facts["steps"].values())
    steps |= {value.item() for key, value in tensors.items() if key.endswith(".step") and value.numel() == 1}
    if len(steps) > 1:
        return "its parameters have been updated a different number of times"
    step = whole_step(steps.pop() if steps else 0)
    if step is None:
        return "the number of its steps is none that a training has"
    rate, decay, momentum = (_number(group, *name.split()) for name in ("initial_lr lr", "weight_decay", "momentum"))
    if rate is None or decay is None or momentum is None:
        return "its rate, weight decay or momentum is no number"
    found: dict[str, Tensor] = {}
    for kind in MOMENTA:
        theirs = {order[int(key.split(".")[0])]: value for key, value in tensors.items() if key.endswith(f".{kind}")}
        if not theirs:
            continue
        try:
            ours = mapped(theirs)
        except TransformerXLError as error:
            return f"its {kind} does not fit the weights ({error})"
        found |= momenta(ours, kind=kind, step=None if name == "sgd" else step)
    if name != "sgd" and not found:
        return "it has taken no step yet"
    rates = {"learning_rate": rate, "weight_decay": decay, "momentum": momentum}
    return OptimiserState(name=name, step=step, tensors=found, **rates)


def _number(group: Mapping[str, Any], *names: str) -> float | None:
    """The first of these that is there; 0 for none."""
    value = next((group[name] for name in names if group.get(name) is not None), 0.0)
    return float(value) if type(value) in (int, float) and 0 <= value <= LARGEST_NUMBER else None


def _name(group: Mapping[str, Any]) -> str | None:
    if "amsgrad" in group:
        if any(group.get(name) != value for name, value in TORCH_ADAM.items()):
            return None
        return "adamw" if group.get("decoupled_weight_decay") else "adam"
    if "dampening" in group and not group.get("dampening") and not group.get("nesterov"):
        return "sgd"
    return None


# --- and back


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
        **layout.settings_to(config),
        "n_token": config.vocabulary,
        "tie_weight": config.tie_embeddings,
        "tgt_len": segment,
        "ext_len": context,
        "attn_type": attn_type,
    }


def state_to_original(ours: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """What their `load_state_dict` takes: a tensor that they keep under several names is one tensor under each."""
    theirs = layout.weights_to(ours, config, layout.ORIGINAL)
    if config.frequencies == "float16":
        name = layout.ORIGINAL.frequencies
        theirs[name] = theirs[name].half()
    for copy, source in layout.copies(config, layout.ORIGINAL):
        if copy.startswith(("crit.out_layers.", "crit.out_projs.")):
            theirs[copy] = theirs[source]
    return theirs


def _check_expressible(config: ModelConfig) -> None:
    absolute = config.encoding in ("absolute", "per_layer")
    wrong = {
        "encoding": config.encoding not in ENCODINGS.values(),
        "share_biases": not config.share_biases,
        "norm": config.norm not in ("post", "pre_keys" if absolute else "pre"),
        "norm_eps": config.norm_eps != EPS,
        "initial_memory": config.memory > 0 and config.initial_memory != "empty",
        "d_model": config.encoding == "per_layer" and config.d_model != config.n_head * config.d_head,
    }
    layout.refuse(config, whose="the authors' code", wrong=wrong)
