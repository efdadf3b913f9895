"""A foreign checkpoint -> an ordinary run folder. The files are found (`sources`), the child is asked what they hold (`asking`), their format says what
that means (`formats`); with a tokenizer and a configuration it is written at once."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from transformer_xl import __version__
from transformer_xl.checkpoint import About, Counters, RunFolder, TrainingState, write_checkpoint
from transformer_xl.config import EvaluationConfig, ModelConfig, RunConfig, TrainingConfig
from transformer_xl.config.fields import convert
from transformer_xl.config.sources import read_file
from transformer_xl.console import say
from transformer_xl.data.text.tokenizers import load_tokenizer
from transformer_xl.errors import CheckpointError, ImportRefused, TransformerXLError
from transformer_xl.files import atomic_folder, digest, hidden_folder, write_json
from transformer_xl.interop.asking import contents_of
from transformer_xl.interop.formats import huggingface
from transformer_xl.interop.formats.foreign_model import ForeignModel, Lengths, OptimiserState
from transformer_xl.interop.formats.original import contents_of_export, model_from_torch
from transformer_xl.interop.formats.tensorflow import model_from_variables
from transformer_xl.interop.formats.vocabularies import ForeignVocabulary, choose_tokenizer, numbers_only
from transformer_xl.interop.sources import Source, find_source
from transformer_xl.model import parameter_count

LARGEST_TEXT = 256 << 20
STEPS_MORE = 10_000
"""How far training would go on, where nothing says how long it was to be."""
NAMES = {
    "original": "the authors' PyTorch code",
    "huggingface": "Hugging Face's TransfoXL",
    "nvidia": "NVIDIA's Transformer-XL",
    "tensorflow": "the authors' TensorFlow code",
    "transformers": "our own classes for transformers",
}


@dataclass(frozen=True, kw_only=True)
class Imported:
    run: Path
    kind: str
    model: ModelConfig
    evaluation: EvaluationConfig
    parameters: int
    vocabulary: ForeignVocabulary
    step: int
    optimiser: str
    """In words: what became of the optimiser's state."""


def import_run(source: Path, out: Path, *, lengths: Lengths, vocabulary: Path | None = None) -> Imported:
    """`out` appears whole or not at all. Whatever is wrong with the files is an ImportRefused of one sentence that names one of them."""
    if out.exists():
        raise CheckpointError(f"{out} exists already; choose another folder for the imported run")
    found = find_source(source)
    parent = next(folder for folder in out.absolute().parents if folder.is_dir())
    with hidden_folder(parent) as scratch:
        try:
            foreign = read_model(found, lengths=lengths, scratch=scratch)
            words = _vocabulary(found, foreign, asked=vocabulary, scratch=scratch / "vocabulary")
            config = _run_config(foreign, lengths)
        except ImportRefused:
            raise
        except TransformerXLError as error:
            raise ImportRefused(f"{found.model}: {error}") from None
        return _write(out, found, foreign, words, config)


# --- the model


def read_model(source: Source, *, lengths: Lengths, scratch: Path) -> ForeignModel:
    match source.kind:
        case "huggingface":
            foreign = _read_huggingface(source, lengths, scratch)
        case "tensorflow":
            variables = contents_of({"bundle": source.model}, scratch=scratch)["bundle"].tensors.get("model", {})
            told = read_file(source.config) if source.config else {}
            foreign = model_from_variables(variables, told=told, told_in=source.config, lengths=lengths)
        case "torch":
            foreign = _read_torch(source, lengths, scratch)
    weights = {name: value.float() for name, value in foreign.weights.items()}
    for name, value in weights.items():
        if not foreign.weights[name].is_floating_point():
            raise ImportRefused(f"{source.model}: {name} holds whole numbers where weights belong")
        if not bool(torch.isfinite(value).all()):
            raise ImportRefused(f"{source.model}: {name} holds a number that is not finite; the model is of no use")
    return replace(foreign, weights=weights)


def _read_huggingface(source: Source, lengths: Lengths, scratch: Path) -> ForeignModel:
    assert source.config is not None
    told = read_file(source.config)
    ours = told.get("model_type") == RunConfig.model_type  # saved by transformers
    saved = convert(ModelConfig, told.get("model"), name="model") if ours else None
    config = lengths.given_to(saved or huggingface.config_from_huggingface(told))
    if source.model.suffix == ".safetensors":
        try:
            theirs: dict[str, Tensor] = load_file(source.model)
        except SafetensorError as error:
            raise ImportRefused(f"{source.model}: it is damaged, or no safetensors file ({error})") from None
    elif ours:
        raise ImportRefused(f"{source.model}: a model of ours is saved as safetensors, never so")
    else:
        contents = contents_of({"model": source.model}, scratch=scratch)["model"]
        if contents.kind != "weights":
            raise ImportRefused(f"{source.model}: it holds more than weights, which Hugging Face's does not")
        theirs = contents.tensors.get("model", {})
    return (
        huggingface.model_from_saved(theirs, config)
        if ours
        else huggingface.model_from_huggingface(theirs, config, told)
    )


def _read_torch(source: Source, lengths: Lengths, scratch: Path) -> ForeignModel:
    files = {"model": source.model} | ({"optimiser": source.optimiser} if source.optimiser else {})
    contents = contents_of(files, scratch=scratch)
    model, optimiser = contents["model"], contents.get("optimiser")
    if model.kind == "weights" and source.config is not None:
        model = contents_of_export(read_file(source.config), model)
    if model.kind not in ("original", "nvidia"):
        raise ImportRefused(f"{source.model}: it holds {model.kind} and no whole model")
    if optimiser is not None and optimiser.kind != "optimiser":
        raise ImportRefused(f"{source.optimiser}: it holds no optimiser's state")
    return model_from_torch(model, optimiser=optimiser or model, lengths=lengths)


# --- the vocabulary


def _vocabulary(source: Source, foreign: ForeignModel, *, asked: Path | None, scratch: Path) -> ForeignVocabulary:
    """The one asked for, else the model file's own, else the one that lies beside."""
    size, file = foreign.model.vocabulary, asked
    if asked is None and foreign.vocabulary is None:
        file = source.vocabulary
    if file is not None:
        words = replace(read_vocabulary_file(file, scratch=scratch), file=file)
    elif foreign.vocabulary is not None:
        words = choose_tokenizer(foreign.vocabulary, name=source.model)
    else:
        return numbers_only(size)
    where, found = file or source.model, words.tokenizer.size
    if found != size and asked is None and not source.vocabulary_is_beside:
        say(f"{where} is another model's: it has {found:,} symbols where this one has {size:,}, so it is passed over")
        return numbers_only(size)
    if found != size:
        raise ImportRefused(
            f"{where}: it has {found:,} symbols where the model has {size:,}; give the right one with `vocabulary=`"
        )
    return words


def read_vocabulary_file(path: Path, *, scratch: Path) -> ForeignVocabulary:
    """A text file with a symbol a line, a pickled vocabulary of any of the formats, or a folder with a tokenizer of ours, such as a data store."""
    if path.is_dir():
        return ForeignVocabulary(tokenizer=load_tokenizer(path), reason=f"the tokenizer of {path.name}")
    if not path.is_file():
        raise ImportRefused(f"there is no vocabulary {path}")
    if path.suffix == ".txt":
        return choose_tokenizer({"symbols": _lines(path)}, name=path)
    scratch.mkdir()
    facts = contents_of({"vocabulary": path}, scratch=scratch)["vocabulary"].facts
    if "vocabulary" not in facts:
        raise ImportRefused(f"{path} holds no vocabulary")
    return choose_tokenizer(facts["vocabulary"], name=path)


def _lines(path: Path) -> list[str]:
    if path.stat().st_size > LARGEST_TEXT:
        raise ImportRefused(f"{path} has {path.stat().st_size:,} bytes, too many for a vocabulary")
    try:
        symbols = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise ImportRefused(f"{path} is no vocabulary: it is not UTF-8") from None
    symbols = [symbol.removesuffix("\r") for symbol in symbols]
    if "" in symbols or len(set(symbols)) != len(symbols):
        raise ImportRefused(f"{path} is no vocabulary: it has an empty line, or a symbol twice")
    return symbols


# --- the run


def _run_config(foreign: ForeignModel, lengths: Lengths) -> RunConfig:
    model, known = foreign.model, dict(foreign.training)
    segment = lengths.segment or foreign.segment or TrainingConfig().segment
    if model.encoding == "per_layer":
        segment = min(segment, model.learned_positions)
    if isinstance(foreign.optimiser, OptimiserState):
        known["optimiser"] = foreign.optimiser.name
        known["weight_decay"], known["momentum"] = foreign.optimiser.weight_decay, foreign.optimiser.momentum
        if foreign.optimiser.learning_rate > 0:
            known.setdefault("learning_rate", foreign.optimiser.learning_rate)
    known["steps"] = max(known.get("steps", foreign.step + STEPS_MORE), 1)
    evaluation = {name: getattr(model, name) for name in ("memory", "clamp_len", "same_length")}
    evaluation = {"segment": segment, **evaluation, **foreign.evaluation, **lengths.asked()}
    if lengths.segment is not None:
        evaluation["segment"] = segment
    return RunConfig(
        model=model,
        training=TrainingConfig(segment=segment, context=foreign.context, **known),
        evaluation=EvaluationConfig(**evaluation),
    )


def _write(out: Path, source: Source, foreign: ForeignModel, words: ForeignVocabulary, config: RunConfig) -> Imported:
    optimiser = "none came with the model"
    if isinstance(foreign.optimiser, OptimiserState):
        optimiser = f"{foreign.optimiser.name}, after {foreign.step:,} steps"
    elif foreign.optimiser is not None:
        optimiser = f"left out: {foreign.optimiser}"
    about = About(
        corpus=words.corpus,
        rule=f"imported from {NAMES[foreign.kind]}; how its corpus was read is not known",
        unit=words.unit,
        data="",
        step=foreign.step,
    )
    files = [source.model, source.config, source.optimiser, words.file]
    if source.kind == "tensorflow":
        files += sorted(source.model.parent.glob(f"{source.model.stem}.data-*"))
    provenance = {
        "kind": foreign.kind,
        "made_by": f"txl import, transformer-xl {__version__}",
        "files": [
            {"name": path.name, "bytes": path.stat().st_size, "sha256": digest(path)}
            for path in files
            if path is not None and path.is_file()
        ],
        "rules": {**foreign.rules, "vocabulary": words.reason, "weights": "float32"},
        "optimiser": optimiser,
    }
    # As `training` keeps it: the data are read from their beginning, with an empty memory, for no old format says where it stood in ours. Without
    # the optimiser's state training can go on, too: an optimiser without one begins anew.
    momenta = foreign.optimiser.tensors if isinstance(foreign.optimiser, OptimiserState) else {}
    tensors = {"random.cpu": torch.Generator().manual_seed(config.training.seed).get_state(), **momenta}
    with atomic_folder(out) as temporary:
        run = RunFolder(temporary)
        write_json(run.config, asdict(config))
        write_json(temporary / "provenance.json", provenance)
        write_checkpoint(
            run.checkpoint_at(foreign.step),
            config=config,
            about=about,
            weights=foreign.weights,
            tokenizer=words.tokenizer,
            training=TrainingState(tensors=tensors, counters=Counters.unbegun(step=foreign.step)),
        )
    return Imported(
        run=out,
        kind=foreign.kind,
        model=foreign.model,
        evaluation=config.evaluation,
        parameters=parameter_count(config.model),
        vocabulary=words,
        step=foreign.step,
        optimiser=optimiser,
    )
