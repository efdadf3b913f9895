"""A trained model at rest: one folder <-> model + tokenizer + configuration, and what exact resuming needs. Safetensors and JSON only.

    step-00001000/
      config.json           the resolved configuration
      about.json            corpus, unit and rule of its figures, step, validation
      model.safetensors     the weights to use (averaged, where the run averages); or in 8 bits (`eight_bits`)
      tokenizer/
      adapter.safetensors   where only an adapter is trained; model.safetensors then holds the sum
      training.safetensors  optimiser, averages, memory, random states  } only where training goes on
      training.json         counters, lane positions, schedule          }
      checksums.json        of all the above

With `training.shards` the two safetensors are in pieces, one of each rank (`shards`).

A checkpoint appears whole or not at all (`files.atomic_folder`), and is read only when every checksum is right.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from transformer_xl.checkpoint.adapter_file import Adapter, merge_adapter, write_adapter
from transformer_xl.checkpoint.box import folder_of
from transformer_xl.checkpoint.eight_bits import EIGHT_BITS, as_float32
from transformer_xl.checkpoint.run_folder import ADAPTER_FILE, RunFolder
from transformer_xl.checkpoint.shards import AnyTensor, Shards, reading_whole_or_shards, whole_tensors
from transformer_xl.checkpoint.training_state import Counters, TrainingState
from transformer_xl.config import RunConfig
from transformer_xl.config.fields import read
from transformer_xl.data.text.tokenizers import Tokenizer, load_tokenizer
from transformer_xl.errors import CheckpointError, ConfigError, TransformerXLError
from transformer_xl.files import atomic_folder, digest, put_back, strange_file, write_json
from transformer_xl.model import AnyModel, build_shapes
from transformer_xl.tensor_files import FLOATING, TensorFile, kinds_of, word_for

CHECKSUMS = "checksums.json"
WEIGHTS = "a file of weights"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class About:
    """What a reader of figures must know of the model."""

    corpus: str
    rule: str
    """How the corpus was read."""
    unit: str
    """bits_per_character, bits_per_byte or perplexity_per_word."""
    data: str
    """Where the store lay."""
    step: int
    validation_nats: float | None = None


@dataclass(kw_only=True)
class Checkpoint:
    folder: Path
    config: RunConfig
    about: About
    model: AnyModel
    tokenizer: Tokenizer
    run: RunFolder | None = None
    """The run it belongs to, where results about it are written."""
    adapter: Adapter | None = None
    """What was added to its weights."""


def write_checkpoint(
    folder: Path,
    *,
    config: RunConfig,
    about: About,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    training: TrainingState | None = None,
    adapter: Adapter | None = None,
) -> None:
    with atomic_folder(folder) as temporary:
        plain = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
        save_tensors(plain, temporary / "model.safetensors")
        if adapter is not None:
            write_adapter(temporary / ADAPTER_FILE, adapter)
        if training is not None:
            save_tensors(training.tensors, temporary / "training.safetensors")
        counters = None if training is None else training.counters
        write_facts(temporary, config=config, about=about, tokenizer=tokenizer, counters=counters)
        write_checksums(temporary)


def write_facts(
    folder: Path, *, config: RunConfig, about: About, tokenizer: Tokenizer, counters: Counters | None
) -> None:
    """All of a checkpoint but its tensors."""
    write_json(folder / "config.json", asdict(config))
    write_json(folder / "about.json", asdict(about))
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")
    if counters is not None:
        write_json(folder / "training.json", counters.to_json())


def write_checksums(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """`known`: of files whose checksum somebody else has found."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    checksums = {name: (known or {}).get(name) or digest(path) for name, path in names.items()}
    (folder / CHECKSUMS).write_text(_canonical(checksums), encoding="utf-8")


def save_tensors(tensors: dict[str, Tensor], path: Path, *, metadata: dict[str, str] | None = None) -> None:
    """As safetensors does it; but what the disk refuses is an OSError, as everywhere else, and whoever may read the folder may read the file, which
    safetensors leaves to its owner alone."""
    try:
        save_file(tensors, path, metadata=metadata)
        path.chmod(path.parent.stat().st_mode & 0o666)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None


def verify(folder: Path) -> None:
    """Every file is there, none is added, each has its checksum; otherwise a CheckpointError that names the first that is not so."""
    way_out = "use an older checkpoint of the run, or a copy"
    try:
        strange = strange_file(sorted(folder.rglob("*")))
    except RecursionError:
        raise CheckpointError(f"{folder} holds folders nested deeper than a checkpoint has; {way_out}") from None
    if strange is not None:
        raise CheckpointError(f"{strange} is a link or a special file, where a checkpoint has plain files; {way_out}")
    try:
        text = (folder / CHECKSUMS).read_text(encoding="utf-8")
        checksums = json.loads(text)
        if not isinstance(checksums, dict) or text != _canonical(checksums):
            raise ValueError
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no checkpoint (there is no {CHECKSUMS}); name a run or one of its checkpoints"
        ) from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{folder / CHECKSUMS} is damaged; {way_out}") from None
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {CHECKSUMS}
    for name in sorted(checksums.keys() | present):
        if name not in present:
            raise CheckpointError(f"{folder / name} is missing; {way_out}")
        if name not in checksums:
            raise CheckpointError(f"{folder / name} does not belong to this checkpoint; remove it")
        if digest(folder / name) != checksums[name]:
            raise CheckpointError(f"{folder / name} is damaged (its checksum is another); {way_out}")


def is_ours(path: Path | str) -> bool:
    """Whether a folder is a run or a checkpoint of ours, by its names."""
    put_back(Path(path))
    return (Path(path) / CHECKSUMS).is_file() or RunFolder(path).checkpoints.is_dir()


def verified_folder(run: Path | str | None) -> Path:
    """Of a run its best checkpoint, else its newest; a checkpoint's own folder is itself. None is the model in the box. Every checksum is right."""
    path = folder_of(run)
    put_back(path)
    folder = path if (path / CHECKSUMS).is_file() else RunFolder(path).chosen_checkpoint()
    verify(folder)
    return folder


def load_checkpoint(
    run: Path | str | None, *, device: torch.device | str = "cpu", adapter: Path | str | None = None
) -> Checkpoint:
    """From a run (its best checkpoint, else its newest), from a checkpoint's own folder or from the box (None), with the adapter in a file added to it.
    Ready for evaluation."""
    folder = verified_folder(run)
    config = read_config(folder / "config.json")
    in_eight_bits = (folder / EIGHT_BITS).is_file()
    if in_eight_bits and (folder / "model.safetensors").exists():
        raise CheckpointError(f"{folder} has {EIGHT_BITS} and model.safetensors, which can be two models; use a copy")
    model = load_model(folder / (EIGHT_BITS if in_eight_bits else "model.safetensors"), config=config)
    added = None if adapter is None else merge_adapter(model, adapter)
    model = model.to(device).eval()
    tokenizer = load_tokenizer(folder / "tokenizer")
    if tokenizer.size != config.model.vocabulary:
        raise CheckpointError(
            f"{folder / 'tokenizer'} has {tokenizer.size:,} tokens where config.json says {config.model.vocabulary:,} (model.vocabulary);"
            " it is another model's"
        )
    whole = RunFolder(folder.parents[1]) if folder.parent.name == "checkpoints" else None
    about = read_about(folder / "about.json")
    return Checkpoint(
        folder=folder, config=config, about=about, model=model, tokenizer=tokenizer, run=whole, adapter=added
    )


def read_config(path: Path) -> RunConfig:
    return _read_as(RunConfig, path)


def read_about(path: Path) -> About:
    return _read_as(About, path)


def _read_as(kind: type[T], path: Path) -> T:
    try:
        return read(kind, _read_json(path), name="")
    except CheckpointError:
        raise
    except TransformerXLError as error:
        raise CheckpointError(f"{path}: {error}") from None


def load_model(path: Path, *, config: RunConfig) -> AnyModel:
    """The model of `config` with the weights of a file, which must hold exactly its tensors, in its shapes and all of one floating type."""
    with reading_whole_or_shards(path, what=WEIGHTS) as found:
        file = as_float32(found) if path.name == EIGHT_BITS and isinstance(found, TensorFile) else found
        _check_counts(file.path, list(file.kinds), config)
        _check_size(file, config)
        try:
            model = build_shapes(config.model)
        except ConfigError as error:
            raise CheckpointError(f"{file.path}: config.json, {error}") from None
        weights = whole_tensors(_weights(file, model, dtype=_floating(file)))
    model.load_state_dict(weights, assign=True)
    return model


def read_weights(path: Path, *, model: AnyModel) -> dict[str, AnyTensor]:
    """For a model that is there already, and of its own type. Pieces, where they are in shards."""
    with reading_whole_or_shards(path, what=WEIGHTS) as file:
        return _weights(file, model, dtype=model.vocabulary.bias_V.dtype)


def _weights(file: TensorFile | Shards, model: AnyModel, *, dtype: torch.dtype) -> dict[str, AnyTensor]:
    file.check(kinds_of(model.state_dict(), dtype=dtype), asker="config.json")
    return {**file.tensors()}


def _floating(file: TensorFile | Shards) -> torch.dtype:
    """What the first weight is; all others must be the same."""
    name = min(file.kinds)
    dtype = file.kinds[name].dtype
    if isinstance(dtype, str) or dtype not in FLOATING:
        known = ", ".join(map(word_for, FLOATING))
        raise CheckpointError(f"{file.path}: {name} holds {word_for(dtype)}; weights may be {known}, all of one type")
    return dtype


def _check_counts(path: Path, names: list[str], config: RunConfig) -> None:
    """Before building: a wrong number could ask for a million layers."""
    for what, field_name in {"layers": "n_layer", "auxiliary_classifiers": "auxiliary_targets"}.items():
        found = len({name.split(".")[1] for name in names if name.startswith(f"{what}.")})
        wanted = getattr(config.model, field_name, 0)
        if found != wanted:
            raise CheckpointError(f"{path} has {found} {what} where config.json says {wanted} (model.{field_name})")


SHAPING = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "d_hidden")


def _check_size(file: TensorFile | Shards, config: RunConfig) -> None:
    """Also before building: thousands of layers are named in a small file, but not filled."""
    model = config.model
    least = model.n_layer * model.numbers_of_a_layer
    found = sum(prod(kind.shape) for kind in file.kinds.values())
    if found < least:
        sizes = ", ".join(f"{name} {value:,}" for name, value in vars(model).items() if name in SHAPING)
        raise CheckpointError(
            f"{file.path} holds {found:,} numbers where the layers of config.json ({sizes}) have {least:,} or more; it is another model's"
        )


def read_training_state(folder: Path) -> TrainingState:
    path = folder / "training.json"
    if not path.is_file():
        raise CheckpointError(f"{folder} has weights but no training state; it can be used, but not resumed")
    with reading_whole_or_shards(folder / "training.safetensors", what="a training state") as file:
        tensors, values = file.tensors(), _read_json(path)
    if (told := read_about(folder / "about.json").step) != values.get("step"):
        step = values.get("step")
        raise CheckpointError(f"{path}: step is {step!r} where about.json says {told}; use an older checkpoint")
    return TrainingState(tensors=tensors, counters=Counters.from_json(values, path=path))


def same_tokenizer(folder: Path, store: Path) -> bool:
    """Whether the checkpoint's tokenizer is the store's, to the byte."""
    files = [path for path in (folder / "tokenizer").iterdir() if path.is_file()]
    theirs = [(path, store / path.name) for path in files]
    return all(other.is_file() and path.read_bytes() == other.read_bytes() for path, other in theirs)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no table of fields")
    return value


def _canonical(checksums: dict[str, str]) -> str:
    return json.dumps(checksums, indent=2, sort_keys=True) + "\n"
