"""Our run -> somebody else's folder, which appears whole or not at all. Whatever a format cannot express is refused by the field, or said.

huggingface   config.json, model.safetensors, vocab.txt                      TransfoXL of transformers up to 4.35
original      constructor.json, state_dict.pt, vocab.txt                     the authors' PyTorch code
safetensors   config.json, model.safetensors, tokenizer/, about.json         a checkpoint of ours, without what only training needs
onnx          model.onnx, config.json, tokenizer/                            in `onnx_graph`
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from transformer_xl.checkpoint import Checkpoint, save_tensors, write_checkpoint
from transformer_xl.data.text.tokenizers import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from transformer_xl.errors import CheckpointError
from transformer_xl.files import atomic_folder, write_json, write_text
from transformer_xl.interop.formats.huggingface import config_to_huggingface, weights_to_huggingface
from transformer_xl.interop.formats.onnx_graph import check_graph, describe_graph, require_onnx, write_graph
from transformer_xl.interop.formats.original import constructor_arguments, state_to_original
from transformer_xl.interop.sources import CONSTRUCTOR, STATE
from transformer_xl.model import AnyModel, TransformerXL


@dataclass(frozen=True, kw_only=True)
class Exported:
    files: list[str]
    notes: list[str]
    """What a reader should know, a sentence each."""


Export = Callable[[Checkpoint, Path], list[str]]
"""Fills a folder, and says what a reader should know of it."""


def export(checkpoint: Checkpoint, out: Path, *, to: str) -> Exported:
    """`to`: one of EXPORTS."""
    if out.exists():
        raise CheckpointError(f"{out} exists already; choose another folder")
    with atomic_folder(out) as folder:
        notes = EXPORTS[to](checkpoint, folder)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return Exported(files=files, notes=notes)


def export_huggingface(checkpoint: Checkpoint, folder: Path) -> list[str]:
    model = _transformer(checkpoint, "Hugging Face's TransfoXL")
    config = config_to_huggingface(model.config)
    write_json(folder / "config.json", {**config, "tgt_len": checkpoint.config.training.segment})
    weights = weights_to_huggingface(_weights(model), model.config)
    save_tensors(weights, folder / "model.safetensors", metadata={"format": "pt"})
    words = checkpoint.tokenizer.words if isinstance(checkpoint.tokenizer, WordTokenizer) else None
    return _write_vocabulary(folder, words, checkpoint.tokenizer)


def export_original(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Their own files are a pickle of the whole module, which is a program; this is the module's state, plain tensors by name."""
    model, training = _transformer(checkpoint, "the authors' code"), checkpoint.config.training
    arguments = constructor_arguments(model.config, segment=training.segment, context=training.context)
    write_json(folder / CONSTRUCTOR, arguments)
    torch.save(state_to_original(_weights(model), model.config), folder / STATE)
    said = _write_vocabulary(folder, _original_symbols(checkpoint.tokenizer), checkpoint.tokenizer)
    return [
        f"in the authors' code: model = MemTransformerLM(**json.load(open('{CONSTRUCTOR}')));"
        f" model.load_state_dict(torch.load('{STATE}', weights_only=True))",
        *said,
    ]


def export_safetensors(checkpoint: Checkpoint, folder: Path) -> list[str]:
    about = replace(checkpoint.about, data="")  # a place on this machine says nothing on another
    write_checkpoint(
        folder / "checkpoint",
        config=checkpoint.config,
        about=about,
        weights=_weights(checkpoint.model),
        tokenizer=checkpoint.tokenizer,
    )
    for path in list((folder / "checkpoint").iterdir()):
        path.rename(folder / path.name)
    (folder / "checkpoint").rmdir()
    return ["every command of txl takes this folder in place of a run"]


def export_onnx(checkpoint: Checkpoint, folder: Path) -> list[str]:
    require_onnx()
    model = _transformer(checkpoint, "our ONNX graphs, which are of attention")
    write_graph(model, folder / "model.onnx")
    difference = check_graph(folder / "model.onnx", model)
    write_json(folder / "config.json", describe_graph(model, checkpoint.config))
    (folder / "tokenizer").mkdir()
    checkpoint.tokenizer.save(folder / "tokenizer")
    return [
        f"onnxruntime gives what torch gives, over segments of several lengths with memory, within {difference:.1e} of its values"
    ]


EXPORTS: dict[str, Export] = {
    "huggingface": export_huggingface,
    "original": export_original,
    "onnx": export_onnx,
    "safetensors": export_safetensors,
}


def _transformer(checkpoint: Checkpoint, whose: str) -> TransformerXL:
    if not isinstance(checkpoint.model, TransformerXL):
        cell = checkpoint.model.config.cell
        raise CheckpointError(
            f"model.cell: a recurrent model ({cell}) has no counterpart in {whose}; export it `to=safetensors`"
        )
    return checkpoint.model


def _weights(model: AnyModel) -> dict[str, Tensor]:
    """Wherever the model is: a file that names a GPU cannot be read where there is none."""
    return {name: weight.cpu() for name, weight in model.state_dict().items()}


def _write_vocabulary(folder: Path, symbols: list[str] | None, tokenizer: Tokenizer) -> list[str]:
    if symbols is None:
        return [f"no vocab.txt: that code has no counterpart of this {tokenizer.kind} tokenizer"]
    write_text(folder / "vocab.txt", "".join(f"{symbol}\n" for symbol in symbols))
    return []


def _original_symbols(tokenizer: Tokenizer) -> list[str] | None:
    """As their corpora are written: words, numbers of bytes, or characters with _ for a space."""
    if isinstance(tokenizer, WordTokenizer):
        return tokenizer.words
    if isinstance(tokenizer, ByteTokenizer):
        return [str(value) for value in tokenizer.values]
    if isinstance(tokenizer, CharTokenizer) and not {"_", "\n"} & set(tokenizer.characters):
        return ["_" if character == " " else character for character in tokenizer.characters]
    return None
