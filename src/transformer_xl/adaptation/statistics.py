"""How large gradients are on training text, weight by weight: what the rule rms divides by. Gathered once, and kept in the run.

NAME of each weight, and of each adapter's moving factor       float32, the root of the mean square over segments
header: kind, base (the fingerprint of the weights), segment, tokens, rank of the adapters, sha256 of all this
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from transformer_xl.adaptation.fast_weights import FastWeights
from transformer_xl.checkpoint.adapter_file import whole_number
from transformer_xl.config import AdaptationConfig
from transformer_xl.console import Advance
from transformer_xl.data.store import Split
from transformer_xl.errors import CheckpointError, ConfigError, DataError
from transformer_xl.model import AnyModel, Recurrent
from transformer_xl.tensor_files import Kind, checksum, reading, write_tensors

KIND = "sizes of gradients"
TOLD = ("segment", "tokens", "rank")
LEAST_SIZE = 1e-20
"""Of a gradient; nothing can be divided by the mean of smaller ones."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    segment: int
    tokens: int
    """Of the training text, on which they were gathered."""
    rank: int
    """Of the adapters. 0: the model can have none."""
    sizes: Mapping[str, Tensor] = field(repr=False)

    @property
    def fingerprint(self) -> str:
        return checksum(self.sizes, {})


def gather(
    model: AnyModel, split: Split, *, segment: int, segments: int, rank: int, advance: Advance | None = None
) -> Statistics:
    """From so many segments, in stretches spread evenly over the text, each read on from the one before it."""
    stretches = max(1, min(segments // 4, 25))
    each = max(1, segments // stretches)
    needed = each * segment + 1
    if len(split) < needed:
        raise DataError(
            f"{split.name} has {len(split):,} tokens where at least {needed:,} are needed; give a longer text, or fewer segments"
        )
    starts = np.linspace(0, len(split) - needed, stretches).astype(np.int64)
    sizes: dict[str, Tensor] = {}
    kinds = ["all"] if isinstance(model, Recurrent) else ["all", "adapters"]
    for learns in kinds:
        fast = FastWeights(model, AdaptationConfig(learns=learns, rank=rank, segment=segment))  # type: ignore[arg-type]
        fast.model.eval()
        squares = [torch.zeros_like(weight, dtype=torch.float32) for weight in fast.trained]
        for start in starts:
            memory = None
            for first in range(start, start + each * segment, segment):
                row_P = torch.from_numpy(np.asarray(split.tokens[first : first + segment + 1], dtype=np.int64))
                row_1P = row_P[None].to(fast.model.vocabulary.bias_V.device)
                output = fast.model(row_1P[:, :-1], targets_BT=row_1P[:, 1:], memory=memory)
                memory = output.memory
                for square, gradient in zip(squares, fast.gradients(output.loss_BT.mean()), strict=True):
                    if gradient is not None:
                        square.addcmul_(gradient.float(), gradient.float())
                if advance:
                    advance(segment)
        count = len(starts) * each
        sizes |= {name: (square / count).sqrt_() for name, square in zip(fast.names, squares, strict=True)}
    return Statistics(
        segment=segment, tokens=len(starts) * each * segment, rank=0 if len(kinds) == 1 else rank, sizes=sizes
    )


def write_statistics(path: Path, statistics: Statistics, *, base: str) -> None:
    told = {name: str(getattr(statistics, name)) for name in TOLD}
    plain = {name: size.cpu().contiguous() for name, size in statistics.sizes.items()}
    write_tensors(path, plain, metadata={"kind": KIND, "base": base, **told})


def read_statistics(path: Path, *, model: AnyModel, base: str) -> Statistics:
    """`base`: the fingerprint of the weights of `model`, of which they must be."""
    with reading(path, what=KIND) as file:
        if file.metadata.get("kind") != KIND:
            raise CheckpointError(f"{path} holds no {KIND}; make it anew with: txl tune-adaptation RUN")
        file.check_metadata(("kind", "base", *TOLD))
        if file.metadata.get("base") != base:
            raise CheckpointError(f"{path} is of other weights than these; make it anew with: txl tune-adaptation RUN")
        numbers = {name: whole_number(file, name) for name in TOLD}
        wanted: dict[str, Kind] = {}
        try:
            for learns in ("all", "adapters") if numbers["rank"] else ("all",):
                how = AdaptationConfig(learns=learns, rank=max(1, numbers["rank"]))
                fast = FastWeights(model, how)
                shapes = zip(fast.names, fast.trained, strict=True)
                wanted |= {name: Kind(torch.float32, tuple(weight.shape)) for name, weight in shapes}
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from None
        file.check(wanted, asker="this model")
        sizes = {name: size.clone() for name, size in file.tensors().items()}
    for name, size in sizes.items():
        if bool((size < 0).any()):
            raise CheckpointError(f"{path}: {name} holds sizes below 0; make it anew with: txl tune-adaptation RUN")
    if not any(bool((size >= LEAST_SIZE).any()) for size in sizes.values()):
        raise CheckpointError(f"{path} holds no gradient that is not 0; make it anew with: txl tune-adaptation RUN")
    return Statistics(sizes=sizes, **numbers)
