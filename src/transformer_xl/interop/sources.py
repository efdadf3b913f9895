"""Which files an import is made of: a file or its folder in, the model's file and those that belong to it out. Reads nothing but names."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformer_xl.errors import ImportRefused

Kind = Literal["huggingface", "torch", "tensorflow"]
HUGGINGFACE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
HUGGINGFACE_VOCABULARIES = ("vocab.pkl", "vocab.bin", "vocab.txt")
TORCH_MODELS = ("model.pt", "checkpoint_last.pt", "checkpoint_best.pt", "state_dict.pt")
CONSTRUCTOR, STATE = "constructor.json", "state_dict.pt"
"""What our own export for the authors' code is made of: their constructor's arguments, and the state of their module."""
BESIDE_A_MODEL = re.compile(r"(cache|vocab|optimizer)\.(pt|pkl|bin|txt)$")
SHARD = re.compile(r"(.+)\.data-\d{5}-of-\d{5}$")


@dataclass(frozen=True, kw_only=True)
class Source:
    kind: Kind
    """By its files; whether a torch file is the authors' or NVIDIA's is known once it is read."""
    model: Path
    config: Path | None = None
    vocabulary: Path | None = None
    vocabulary_is_beside: bool = True
    """In the model's own folder, so that it must be the model's; one folder up it may be another's."""
    optimiser: Path | None = None


def find_source(path: Path) -> Source:
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        return _of_file(path)
    if path.with_name(f"{path.name}.index").is_file():  # as TensorFlow itself names a checkpoint
        return _tensorflow(path.with_name(f"{path.name}.index"))
    raise ImportRefused(f"there is no {path}; name a checkpoint's file or its folder")


def _of_file(path: Path) -> Source:
    if BESIDE_A_MODEL.fullmatch(path.name):
        raise ImportRefused(f"{path} belongs to a model but is none; name the model's file, or the folder of both")
    if path.name == CONSTRUCTOR:
        return _torch(path.with_name(STATE))
    if path.name == "config.json":
        return _huggingface(path.parent, _only_weights(path.parent))
    if path.name in HUGGINGFACE_WEIGHTS or path.suffix in (".safetensors", ".bin"):
        return _huggingface(path.parent, path)
    if path.suffix == ".index":
        return _tensorflow(path)
    if match := SHARD.fullmatch(path.name):
        return _tensorflow(path.with_name(f"{match[1]}.index"))
    if path.name == "checkpoint":
        return _in_folder(path.parent)
    return _torch(path)


def _in_folder(folder: Path) -> Source:
    found: list[Source] = []
    if (folder / "config.json").is_file() and any((folder / name).is_file() for name in HUGGINGFACE_WEIGHTS):
        found.append(_huggingface(folder, _only_weights(folder)))
    torch_files = [folder / name for name in TORCH_MODELS if (folder / name).is_file()]
    found += [_torch(path) for path in torch_files[:1]]
    if indices := sorted(folder.glob("*.index"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)]):
        found.append(_tensorflow(_named_newest(folder, indices) or indices[-1]))
    if not found:
        looked_for = ", ".join((*TORCH_MODELS, *HUGGINGFACE_WEIGHTS, "*.index"))
        raise ImportRefused(f"{folder} holds no checkpoint that is known here (looked for {looked_for}); name the file")
    if len(found) > 1:
        names = " and ".join(source.model.name for source in found)
        raise ImportRefused(f"{folder} holds {names}, two checkpoints; name the file to import")
    return found[0]


def _only_weights(folder: Path) -> Path:
    """safetensors, where there are both: it needs no interpreter."""
    for name in HUGGINGFACE_WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise ImportRefused(f"{folder} has a config.json but neither {' nor '.join(HUGGINGFACE_WEIGHTS)}")


def _huggingface(folder: Path, weights: Path) -> Source:
    if not (folder / "config.json").is_file():
        raise ImportRefused(f"{weights} has no config.json beside it, which says what model it is")
    own = folder / "tokenizer"  # of a model of ours that transformers saved
    vocabulary = own if own.is_dir() else _first(folder, HUGGINGFACE_VOCABULARIES)
    return Source(kind="huggingface", model=weights, config=folder / "config.json", vocabulary=vocabulary)


def _torch(path: Path) -> Source:
    folder = path.parent
    if path.name == STATE:
        vocabulary, config = _first(folder, ("vocab.txt",)), _first(folder, (CONSTRUCTOR,))
        return Source(kind="torch", model=path, config=config, vocabulary=vocabulary)
    return Source(kind="torch", model=path, optimiser=_first(folder, ("optimizer.pt",)), **_near(folder, "cache.pt"))


def _tensorflow(index: Path) -> Source:
    if not index.is_file():
        raise ImportRefused(f"{index} is missing; a TensorFlow checkpoint is its .index and its .data files together")
    config = _first(index.parent, ("config.json",))
    return Source(kind="tensorflow", model=index, config=config, **_near(index.parent, "cache.pkl"))


def _near(folder: Path, name: str) -> dict[str, Any]:
    """A vocabulary lies with the data, not with the model: beside it, or one folder up, where it may also be another model's."""
    beside = _first(folder, (name,))
    return {"vocabulary": beside or _first(folder.parent, (name,)), "vocabulary_is_beside": beside is not None}


def _named_newest(folder: Path, indices: list[Path]) -> Path | None:
    """The one that TensorFlow's own `checkpoint` file names."""
    note = folder / "checkpoint"
    if not note.is_file() or note.stat().st_size > 1 << 20:
        return None
    text = note.read_text(encoding="utf-8", errors="replace")
    match = re.search(r'^model_checkpoint_path: "([^"]+)"', text, re.MULTILINE)
    names = {path.name: path for path in indices}
    return names.get(f"{Path(match[1]).name}.index") if match else None


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)
