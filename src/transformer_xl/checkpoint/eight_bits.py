"""Weights in 8 bits at rest, for a model that is passed on: a quarter of the bytes. A matrix or a table becomes whole numbers from -127 to 127 and a scale
for each row, whose largest number is 127 times its scale; vectors and biases stay as they are.

    model-8-bit.safetensors, in place of model.safetensors      NAME int8 [..., rows, columns] and NAME.scale float32 [..., rows], or NAME float32

Read back, each number is one product of float32, rounded once: the same bits on every machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer_xl.errors import CheckpointError
from transformer_xl.tensor_files import Kind, TensorFile, check_kinds, is_finite, word_for

EIGHT_BITS = "model-8-bit.safetensors"
SCALE = ".scale"
MOST = 127
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Some processors are told to take smaller numbers for 0, and others not."""


def in_eight_bits(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As they are written."""
    found = {}
    for name, weight in weights.items():
        if weight.dtype != torch.float32:
            raise CheckpointError(f"{name} holds {word_for(weight.dtype)}, and only float32 is written in 8 bits")
        if weight.dim() < 2 or "bias" in name:
            found[name] = weight.contiguous()
            continue
        largest = weight.abs().amax(dim=-1) / MOST
        # A row of zeros, or of next to nothing, has no scale, and is one of zeros.
        scale = largest.where(largest >= LEAST_SCALE, 0.0)
        found[name] = (weight / scale.where(scale > 0, 1.0)[..., None]).round().to(torch.int8)
        found[f"{name}{SCALE}"] = scale
    return found


@dataclass(frozen=True, kw_only=True)
class EightBitFile(TensorFile):
    """An open file of such weights that answers as one of float32 does: `kinds` are what comes out of it."""

    stored: TensorFile

    def tensors(self) -> dict[str, Tensor]:
        found = self.stored.tensors()
        for name in self.kinds:
            if found[name].dtype == torch.int8:
                found[name] = self._product(name, found[name], found.pop(f"{name}{SCALE}"))
        return found

    def _product(self, name: str, steps: Tensor, scale: Tensor) -> Tensor:
        way_out = "it is damaged, or none of ours; use a copy"
        if bool((steps < -MOST).any()):
            raise CheckpointError(f"{self.path}: {name} holds {-MOST - 1}, where numbers go from {-MOST}; {way_out}")
        if bool(((scale != 0) & (scale < LEAST_SCALE)).any()):
            raise CheckpointError(f"{self.path}: {name}{SCALE} holds numbers below 0, or next to it; {way_out}")
        weight = steps.to(torch.float32) * scale[..., None]
        if not is_finite(weight):
            raise CheckpointError(f"{self.path}: {name} times its scale is not finite; {way_out}")
        return weight


def as_float32(file: TensorFile) -> EightBitFile:
    """Of which nothing has been read yet: every int8 has rows, and as many scales as rows."""
    kinds = dict(file.kinds)
    for name, kind in file.kinds.items():
        if kind.dtype == torch.int8:
            if len(kind.shape) < 2:
                raise CheckpointError(f"{file.path}: {name} holds int8 in shape {list(kind.shape)}, which has no rows")
            scale, of_rows = f"{name}{SCALE}", Kind(torch.float32, kind.shape[:-1])
            found = {scale: file.kinds[scale]} if scale in file.kinds else {}
            check_kinds(found, {scale: of_rows}, path=file.path, asker=name)
            kinds.pop(scale)
            kinds[name] = Kind(torch.float32, kind.shape)
    return EightBitFile(path=file.path, kinds=kinds, metadata=file.metadata, handle=file.handle, stored=file)
