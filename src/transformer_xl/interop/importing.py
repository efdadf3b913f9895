"""A foreign checkpoint -> an ordinary run folder: files found, read (`foreign.py`), given a tokenizer and a configuration, written at once."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from transformer_xl import __version__
from transformer_xl.checkpoint import About, RunFolder, TrainingState, write_checkpoint
from transformer_xl.config import EvaluationConfig, ModelConfig, RunConfig, TrainingConfig
from transformer_xl.console import say
from transformer_xl.errors import CheckpointError, ImportRefused, TransformerXLError
from transformer_xl.files import atomic_folder, digest, hidden_folder, write_json
from transformer_xl.interop.formats.foreign_model import Lengths, Read, read_source
from transformer_xl.interop.formats.optimisers import State
from transformer_xl.interop.formats.vocabularies import Chosen, choose_tokenizer, numbers_only, read_vocabulary_file
from transformer_xl.interop.sources import Source, find_source
from transformer_xl.model import parameter_count

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
    vocabulary: Chosen
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
            read = read_source(found, lengths=lengths, scratch=scratch)
            chosen, file = _vocabulary(found, read, asked=vocabulary, scratch=scratch / "vocabulary")
            config = _run_config(read, lengths)
        except ImportRefused:
            raise
        except TransformerXLError as error:
            raise ImportRefused(f"{found.model}: {error}") from None
        return _write(out, found, read, chosen, config, vocabulary=file)


def _vocabulary(source: Source, read: Read, *, asked: Path | None, scratch: Path) -> tuple[Chosen, Path | None]:
    """The tokenizer, and the file of its own that it came from."""
    size = read.model.vocabulary
    if asked is not None:
        chosen, file = read_vocabulary_file(asked, scratch=scratch), asked
    elif read.vocabulary is not None:
        chosen, file = choose_tokenizer(read.vocabulary, name=source.model), None
    elif source.vocabulary is not None:
        chosen, file = read_vocabulary_file(source.vocabulary, scratch=scratch), source.vocabulary
    else:
        return numbers_only(size), None
    where = file or source.model
    if chosen.tokenizer.size != size and asked is None and not source.vocabulary_is_beside:
        say(
            f"{where} is another model's: it has {chosen.tokenizer.size:,} symbols where this one has {size:,}, so it is passed over"
        )
        return numbers_only(size), None
    if chosen.tokenizer.size != size:
        raise ImportRefused(
            f"{where}: it has {chosen.tokenizer.size:,} symbols where the model has {size:,}; give the right one with --vocabulary"
        )
    return chosen, file


def _run_config(read: Read, lengths: Lengths) -> RunConfig:
    known = dict(read.training)
    told = known.pop("evaluation", {})
    segment = lengths.segment or read.segment or TrainingConfig().segment
    if read.model.encoding == "per_layer":
        segment = min(segment, read.model.learned_positions)
    model = read.model
    if isinstance(read.optimiser, State):
        known["optimiser"] = read.optimiser.name
        known["weight_decay"], known["momentum"] = read.optimiser.weight_decay, read.optimiser.momentum
        if read.optimiser.learning_rate > 0:
            known.setdefault("learning_rate", read.optimiser.learning_rate)
    known.setdefault("steps", read.step + STEPS_MORE)
    known["steps"] = max(known["steps"], 1)
    evaluation = {"memory": model.memory, "clamp_len": model.clamp_len, "same_length": model.same_length, **told}
    asked = {name: value for name, value in asdict(lengths).items() if value is not None and name != "segment"}
    evaluation = {"segment": segment, **evaluation, **asked}
    if lengths.segment is not None:
        evaluation["segment"] = segment
    return RunConfig(
        model=model,
        training=TrainingConfig(segment=segment, context=read.context, **known),
        evaluation=EvaluationConfig(**evaluation),
    )


def _write(
    out: Path, source: Source, read: Read, chosen: Chosen, config: RunConfig, *, vocabulary: Path | None
) -> Imported:
    optimiser = "none came with the model"
    if isinstance(read.optimiser, State):
        optimiser = f"{read.optimiser.name}, after {read.step:,} steps"
    elif read.optimiser is not None:
        optimiser = f"left out: {read.optimiser}"
    about = About(
        corpus=chosen.corpus,
        rule=f"imported from {NAMES[read.kind]}; how its corpus was read is not known",
        unit=chosen.unit,
        data="",
        step=read.step,
    )
    files = [source.model, source.config, source.optimiser, vocabulary]
    if source.kind == "tensorflow":
        files += sorted(source.model.parent.glob(f"{source.model.stem}.data-*"))
    provenance = {
        "kind": read.kind,
        "made_by": f"txl import, transformer-xl {__version__}",
        "files": [
            {"name": path.name, "bytes": path.stat().st_size, "sha256": digest(path)}
            for path in files
            if path is not None and path.is_file()
        ],
        "rules": {**read.rules, "vocabulary": chosen.reason, "weights": "float32"},
        "optimiser": optimiser,
    }
    with atomic_folder(out) as temporary:
        run = RunFolder(temporary)
        write_json(run.config, asdict(config))
        write_json(temporary / "provenance.json", provenance)
        write_checkpoint(
            run.checkpoint_at(read.step),
            config=config,
            about=about,
            weights=read.weights,
            tokenizer=chosen.tokenizer,
            training=_training_state(read, config),
        )
    return Imported(
        run=out,
        kind=read.kind,
        model=read.model,
        evaluation=config.evaluation,
        parameters=parameter_count(config.model),
        vocabulary=chosen,
        step=read.step,
        optimiser=optimiser,
    )


def _training_state(read: Read, config: RunConfig) -> TrainingState:
    """As `training` keeps it: the data are read from their beginning, with an empty memory, for no old format says where it stood in ours. Without
    the optimiser's state training can go on, too: an optimiser without one begins anew."""
    momenta = read.optimiser.tensors if isinstance(read.optimiser, State) else {}
    generator = torch.Generator().manual_seed(config.training.seed)
    values: dict[str, Any] = {
        **dict.fromkeys(("tokens", "seconds", "skipped", "average_count"), 0),
        "step": read.step,
        "rate_scale": 1.0,
        "best_nats": None,
        "window": {},
        "lanes": None,
        "scaler": {},
    }
    return TrainingState(tensors={"random.cpu": generator.get_state(), **momenta}, values=values)
