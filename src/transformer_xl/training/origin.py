"""Whose weights a run begins with, where they are not drawn by chance: those of another run, and nothing else of it. Optimiser, schedule and place in
the data begin anew; the model stays the other's."""

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from transformer_xl.checkpoint import Checkpoint, load_checkpoint, same_tokenizer
from transformer_xl.checkpoint.adapter_file import fingerprint
from transformer_xl.config import RunConfig
from transformer_xl.data.store import Store
from transformer_xl.errors import CheckpointError, ConfigError, DataError
from transformer_xl.model.adapters import check_rank
from transformer_xl.tensor_files import word_for

LENGTHS = ("memory", "clamp_len", "same_length")


@dataclass(frozen=True, kw_only=True)
class Origin:
    checkpoint: Checkpoint
    rank: int | None = None
    """Of the adapter to train beside these weights; None: they are trained themselves."""

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        return self.checkpoint.model.state_dict()

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.weights)

    def check(self, config: RunConfig) -> None:
        """The model of `config` must be the one that these weights are of; only its lengths and its dropout may be others."""
        before, now = asdict(self.checkpoint.config.model), asdict(config.model)
        for name in before | now:
            free = name in LENGTHS or "dropout" in name
            if not free and before.get(name) != now.get(name):
                raise ConfigError(
                    f"model.{name}: {now.get(name)} where {self.checkpoint.folder} has {before.get(name)}; leave it out, the weights of `from=` are of its own model"
                )


def open_origin(run: Path | str, *, store: Store, rank: int | None = None) -> Origin:
    """The weights of a run, or of one of its checkpoints, for training on `store`, whose tokens must be the ones that they know."""
    checkpoint = load_checkpoint(run)
    tokenizer, manifest = checkpoint.tokenizer, store.manifest
    if not same_tokenizer(checkpoint.folder, store.folder):
        raise DataError(
            f"{store.folder} was made with another tokenizer ({manifest.vocabulary_size:,} {manifest.tokenizer_kind} tokens) than {run} knows"
            f" ({tokenizer.size:,} {tokenizer.kind} tokens); make it again from its text with: txl prepare TEXT --tokenizer-of {run} --out {store.folder}"
        )
    dtype = checkpoint.model.vocabulary.bias_V.dtype
    if dtype != torch.float32:
        raise CheckpointError(f"{run} holds {word_for(dtype)}, and weights are trained in float32; save them so first")
    if rank is not None:
        check_rank(checkpoint.model, rank)
    return Origin(checkpoint=checkpoint, rank=rank)
