"""A foreign checkpoint read: which of four kinds it is, and what it says, in our own terms."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from transformer_xl.config import ModelConfig, RunConfig
from transformer_xl.config.fields import convert
from transformer_xl.config.sources import read_file
from transformer_xl.errors import CheckpointError, ImportRefused, TransformerXLError
from transformer_xl.interop.asking import Contents, read_foreign
from transformer_xl.interop.formats.huggingface import config_from_huggingface, weights_from_huggingface
from transformer_xl.interop.formats.layout import NVIDIA, ORIGINAL, Layout, check_shapes, shapes_of, weights_from
from transformer_xl.interop.formats.optimisers import State, optimiser_state, whole_step
from transformer_xl.interop.formats.original import SETTINGS, config_from_settings
from transformer_xl.interop.formats.tensorflow import (
    SLOTS,
    config_from_variables,
    model_variables,
    weights_from_variables,
)
from transformer_xl.interop.sources import Source

SAVED_PREFIX = "transformer."
"""What `huggingface.TransformerXLForCausalLM` calls the model inside it."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What the user says of lengths; None where the file's own hold."""

    segment: int | None = None
    memory: int | None = None
    clamp_len: int | None = None
    same_length: bool | None = None


@dataclass(kw_only=True)
class Read:
    """A model as it was read, in our terms."""

    kind: str
    model: ModelConfig
    weights: Mapping[str, Tensor]
    segment: int | None = None
    context: int = 0
    step: int = 0
    training: dict[str, Any] = field(default_factory=dict)
    vocabulary: dict[str, Any] | None = None
    """Where the model's own file holds it."""
    optimiser: State | str | None = None
    rules: dict[str, str] = field(default_factory=dict)


def read_source(source: Source, *, lengths: Lengths, scratch: Path) -> Read:
    match source.kind:
        case "huggingface":
            read = _read_huggingface(source, lengths, scratch)
        case "tensorflow":
            read = _read_tensorflow(source, lengths, scratch)
        case "torch":
            read = _read_torch(source, lengths, scratch)
    for name, value in read.weights.items():
        if not bool(torch.isfinite(value).all()):
            raise ImportRefused(f"{source.model}: {name} holds a number that is not finite; the model is of no use")
    return read


# --- the four kinds


def _read_huggingface(source: Source, lengths: Lengths, scratch: Path) -> Read:
    assert source.config is not None
    told = read_file(source.config)
    if told.get("model_type") == RunConfig.model_type:
        return _read_saved(source, told, lengths)
    config = _with_lengths(config_from_huggingface(told), lengths)
    if source.model.suffix == ".safetensors":
        theirs = _safetensors(source.model)
    else:
        contents = read_foreign({"model": source.model}, folder=scratch)["model"]
        if contents.kind != "weights":
            raise ImportRefused(f"{source.model}: it holds more than weights, which Hugging Face's does not")
        theirs = contents.tensors.get("model", {})
    segment = told.get("tgt_len")
    return Read(
        kind="huggingface",
        model=config,
        weights=_single_precision(weights_from_huggingface(theirs, config)),
        segment=segment if type(segment) is int else None,
        rules={
            "initial_memory": "zeros that are attended to, as Hugging Face computes",
            "same_length_keys": "memory, as Hugging Face computes",
            "clusters": "in the order of the paper",
        },
    )


def _read_saved(source: Source, told: Mapping[str, Any], lengths: Lengths) -> Read:
    """A model of ours that transformers saved, after its Trainer perhaps: our own names, behind one of its."""
    config = _with_lengths(convert(ModelConfig, told.get("model"), name="model"), lengths)
    if source.model.suffix != ".safetensors":
        raise ImportRefused(f"{source.model}: a model of ours is saved as safetensors, never so")
    theirs = _safetensors(source.model)
    weights = {name.removeprefix(SAVED_PREFIX): value for name, value in theirs.items()}
    check_shapes(shapes_of(weights), config)
    return Read(kind="transformers", model=config, weights=_single_precision(weights))


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ImportRefused(f"{path}: it is damaged, or no safetensors file ({error})") from None
    return tensors


def _read_torch(source: Source, lengths: Lengths, scratch: Path) -> Read:
    jobs = {"model": source.model} | ({"optimiser": source.optimiser} if source.optimiser else {})
    contents = read_foreign(jobs, folder=scratch)
    model = contents["model"]
    if model.kind == "weights" and source.config is not None:  # our own export for the authors' code
        told = read_file(source.config)
        known = {name: told[name] for name in (*SETTINGS, "tgt_len", "ext_len") if name in told}
        model = Contents(kind="original", facts={"model": {**known, "parameter_order": []}}, tensors=model.tensors)
        contents = {**contents, "model": model}
    if model.kind not in ("original", "nvidia"):
        raise ImportRefused(f"{source.model}: it holds {model.kind} and no whole model")
    if source.optimiser and contents["optimiser"].kind != "optimiser":
        raise ImportRefused(f"{source.optimiser}: it holds no optimiser's state")
    original = model.kind == "original"
    settings, theirs = dict(model.facts["model"]), model.tensors.get("model", {})
    if lengths.memory is not None:
        settings["mem_len"] = lengths.memory
    keys = "memory" if original else "memory+1"
    config = _with_lengths(config_from_settings(settings, theirs, same_length_keys=keys), lengths)
    layout = ORIGINAL if original else NVIDIA
    weights = _single_precision(weights_from(theirs, config, layout))
    arguments = model.facts.get("arguments", {})
    optimiser = _torch_optimiser(contents, config, layout, settings["parameter_order"], arguments)
    step = optimiser.step if isinstance(optimiser, State) else _steps(settings.get("step", 0), "train_step")
    rules = {
        "initial_memory": "empty, as that code starts",
        "same_length_keys": f"{keys}, as that code counts",
        "clusters": "their rows turned round, for that code has the last tail first",
    }
    if config.learned_positions:
        rules["learned positions"] = "their rows turned round, for that code has the nearest last"
    if config.frequencies == "float16":
        rules["frequencies"] = "rounded to float16, for the file has them so"
    return Read(
        kind=model.kind,
        model=config,
        weights=weights,
        segment=_whole(settings.get("tgt_len")),
        context=_whole(settings.get("ext_len")) or 0,
        step=step,
        training=_training_settings(arguments),
        vocabulary=model.facts.get("vocabulary"),
        optimiser=optimiser,
        rules=rules,
    )


def _read_tensorflow(source: Source, lengths: Lengths, scratch: Path) -> Read:
    variables = read_foreign({"bundle": source.model}, folder=scratch)["bundle"].tensors["model"]
    told = read_file(source.config) if source.config else {}
    theirs = model_variables(variables)
    names = {"mem_len": "memory", "same_length": "same_length", "dropout": "dropout", "dropatt": "attention_dropout"}
    settings = {ours: told[name] for name, ours in names.items() if name in told}
    clamp = told.get("clamp_len", -1)
    config = config_from_variables(theirs, {**settings, "clamp_len": max(0, clamp) if type(clamp) is int else clamp})
    _check_told(told, config, source)
    config = _with_lengths(config, lengths)
    weights = _single_precision(weights_from_variables(theirs, config))
    stepped = variables.get("global_step")
    step = _steps(stepped.item(), "global_step") if stepped is not None and stepped.numel() == 1 else 0
    evaluation = {"segment": "test_tgt_len", "memory": "test_mem_len", "clamp_len": "test_clamp_len"}
    optimiser = _tensorflow_adam(variables, config, step)
    rules = {
        "sizes": "from the shapes of the variables",
        "initial_memory": "zeros that are attended to, as that code computes",
        "same_length_keys": "memory+1, as that code counts",
        "clusters": "in the order of the paper",
        "norm_eps": "1e-12, which that code has",
    }
    if isinstance(optimiser, State):
        rules["adam"] = (
            "its epsilon, 1e-8, is added before the correction for the first steps there and after it here, which is the same but for those steps"
        )
    return Read(
        kind="tensorflow",
        model=config,
        weights=weights,
        segment=_whole(told.get("tgt_len")),
        step=step,
        training={
            "evaluation": {ours: told[name] for ours, name in evaluation.items() if _whole(told.get(name)) is not None}
        },
        optimiser=optimiser,
        rules=rules,
    )


def _check_told(told: Mapping[str, Any], config: ModelConfig, source: Source) -> None:
    """A config.json beside the variables must be theirs."""
    names = {
        "n_layer": "n_layer",
        "d_model": "d_model",
        "n_head": "n_head",
        "d_head": "d_head",
        "vocab_size": "vocabulary",
    }
    for name, ours in names.items():
        if name in told and told[name] != getattr(config, ours):
            raise ImportRefused(
                f"{source.config}: {name} is {str(told[name])[:20]} where the checkpoint has {getattr(config, ours)}; it is another model's"
            )


# --- optimisers


def _torch_optimiser(
    contents: Mapping[str, Contents],
    config: ModelConfig,
    layout: Layout,
    order: list[str],
    arguments: Mapping[str, Any],
) -> State | str | None:
    holder = contents.get("optimiser", contents["model"])
    if "optimiser" not in holder.facts:
        return None
    mapped: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda theirs: weights_from(theirs, config, layout)  # noqa: E731
    called = arguments.get("optim")
    return optimiser_state(
        holder.facts["optimiser"],
        holder.tensors.get("optimiser", {}),
        order=order,
        mapped=mapped,
        called=called if isinstance(called, str) else None,
    )


def _tensorflow_adam(variables: Mapping[str, Tensor], config: ModelConfig, step: int) -> State | str | None:
    found: dict[str, Tensor] = {}
    for kind, slot in SLOTS.items():
        theirs = model_variables(variables, slot)
        if not theirs:
            return None
        try:
            ours = weights_from_variables(theirs, config)
        except TransformerXLError as error:
            return f"its {kind} does not fit the weights ({error})"
        for name, value in ours.items():
            found[f"optimiser.{kind}.{name}"] = value.float().contiguous()
            found[f"optimiser.step.{name}"] = torch.tensor(float(step))
    return State(name="adam", learning_rate=0.0, weight_decay=0.0, momentum=0.0, step=step, tensors=found)


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


def _with_lengths(config: ModelConfig, lengths: Lengths) -> ModelConfig:
    """The model's own memory grows with what is asked for; clamping and masking are of evaluation."""
    changes = {name: value for name, value in asdict(lengths).items() if value is not None and name != "segment"}
    return replace(config, **changes)


def _single_precision(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for name, value in weights.items():
        if not value.is_floating_point():
            raise CheckpointError(f"{name} holds whole numbers where weights belong")
    return {name: value.float() for name, value in weights.items()}


def _steps(value: object, name: str) -> int:
    step = whole_step(value)
    if step is None:
        raise CheckpointError(f"{name}: {str(value)[:20]} is no number of steps; the checkpoint is damaged")
    return step


def _whole(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
