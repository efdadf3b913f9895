"""Our run -> somebody else's folder: Hugging Face's TransfoXL layout, with the vocabulary as plain text. No pickle is ever written."""

from pathlib import Path

from safetensors.torch import save_file

from transformer_xl.checkpoint import Checkpoint
from transformer_xl.data.tokenizers import WordTokenizer
from transformer_xl.errors import CheckpointError
from transformer_xl.files import atomic_folder, write_json, write_text
from transformer_xl.interop.huggingface import config_to_huggingface, weights_to_huggingface
from transformer_xl.model import TransformerXL


def export_huggingface(checkpoint: Checkpoint, out: Path) -> list[str]:
    """The names of the files written. A vocabulary of words goes along as vocab.txt; their tokenizer knows no other kind."""
    if out.exists():
        raise CheckpointError(f"{out} exists already; choose another folder")
    model = checkpoint.model
    if not isinstance(model, TransformerXL):
        raise CheckpointError("a recurrent model has no counterpart in Hugging Face's TransfoXL")
    config = config_to_huggingface(model.config)
    weights = weights_to_huggingface(model.state_dict(), model.config)
    with atomic_folder(out) as folder:
        write_json(folder / "config.json", {**config, "tgt_len": checkpoint.config.training.segment})
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        if isinstance(checkpoint.tokenizer, WordTokenizer):
            write_text(folder / "vocab.txt", "".join(f"{word}\n" for word in checkpoint.tokenizer.words))
        return sorted(path.name for path in folder.iterdir())
