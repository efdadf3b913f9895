"""Our tokenizers as transformers wants one: exactly our numbers and our text, and padding for batches."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizer

from transformer_xl.checkpoint import is_ours, verified_folder
from transformer_xl.data.text.tokenizers import DESCRIPTION, Tokenizer, WordTokenizer, load_tokenizer
from transformer_xl.errors import DataError

FOLDER = "tokenizer"
"""Where a checkpoint has its tokenizer, and where `save_pretrained` writes it: beside, their own tokenizer.json would be another thing."""


class TransformerXLTokenizer(PreTrainedTokenizer):
    """No text is ever split at a special token or cleaned up. The one special token, padding, is the number after the vocabulary, on the left."""

    vocab_files_names = {"vocab_file": f"{FOLDER}/{DESCRIPTION}"}  # noqa: RUF012 (theirs is a dict)
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side = "left"

    def __init__(self, vocab_file: str | None = None, **options: Any) -> None:
        if vocab_file is None:
            raise DataError(f"there is no {FOLDER}/{DESCRIPTION}; name a run, or a folder that save_pretrained wrote")
        self.native = load_tokenizer(Path(vocab_file).parent)
        self._names = unique_names(self.native)
        self._id_of = {name: id for id, name in enumerate(self._names)}
        padding = "<pad>"
        while padding in self._id_of:
            padding = f"<{padding}>"
        defaults = {"pad_token": padding, "split_special_tokens": True, "clean_up_tokenization_spaces": False}
        super().__init__(**{**defaults, "special_tokens_pattern": "none", **options})

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *inputs: Any, **options: Any
    ) -> "TransformerXLTokenizer":
        """A run of ours, one of its checkpoints, or a folder that `save_pretrained` wrote."""
        path = Path(pretrained_model_name_or_path)
        folder = verified_folder(path) if is_ours(path) else path
        loaded: TransformerXLTokenizer = super().from_pretrained(str(folder), *inputs, **options)
        return loaded

    @property
    def vocab_size(self) -> int:
        return self.native.size

    def get_vocab(self) -> dict[str, int]:
        return {**self._id_of, **self._added_tokens_encoder}

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        folder = Path(save_directory) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.native.save(folder)
        return tuple(str(path) for path in sorted(folder.iterdir()))

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self._decode(self.convert_tokens_to_ids(tokens))

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return [self._names[id] for id in self.native.encode(text).tolist()]

    def _convert_token_to_id(self, token: str) -> int | None:
        unknown = self.native.unknown if isinstance(self.native, WordTokenizer) else None
        return self._id_of.get(token, unknown)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index]

    def _decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **options: Any,
    ) -> str:
        """A whole run of tokens at once, for a character may need several."""
        ids = [token_ids] if isinstance(token_ids, int) else [int(id) for id in token_ids]
        parts = []
        for added, run in groupby(ids, key=self._added_tokens_decoder.__contains__):
            if not added:
                parts.append(self.native.decode(list(run)))
            elif not skip_special_tokens:
                parts += [self._added_tokens_decoder[id].content for id in run]
        return "".join(parts)


def unique_names(tokenizer: Tokenizer) -> list[str]:
    """The readable name of each token, with its number behind it where another has the same."""
    names = [tokenizer.token(id) for id in range(tokenizer.size)]
    if len(set(names)) == len(names):
        return names
    known: set[str] = set()
    for id, name in enumerate(names):
        while name in known:
            name = f"{name}#{id}"
        known.add(name)
        names[id] = name
    return names
