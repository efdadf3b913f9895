"""Memory as a value: the inputs of the N layers at past positions, detached, oldest first. Passed in, returned, never stored on a module.

lane 0    . . . a b c      valid 3: the buffer is as long for every lane, and the
lane 1    u v w x y z      valid 6  last `valid` positions of a lane are real
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.files import atomic_file


def check_fits(numbers: int, *, like: Tensor, what: str) -> None:
    """Refuses what is larger than the whole machine. A length may come with a file, where no tensor bounds it."""
    if like.device.type != "cpu" or not hasattr(os, "sysconf"):
        return
    needed, there = numbers * like.itemsize, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise InputError(
            f"{what} takes {needed / 1e9:,.0f} GB, and this machine has {there / 1e9:,.0f}; give a smaller --memory, or fewer lanes"
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    layers: tuple[Tensor, ...]
    """One [B, M, D] for each layer."""
    valid_B: Tensor
    """How many positions of each lane are real. Lives on the CPU: how full a lane is never depends on a device's work."""
    starts_full: bool = False
    """A fresh lane is made of zeros that are attended to, instead of being empty."""

    @classmethod
    def start(cls, *, layers: int, lanes: int, length: int, width: int, like: Tensor, full: bool = False) -> "Memory":
        """Memory before the first token. `length` 0 grows as tokens come; the full length gives one shape from the start."""
        check_fits(
            layers * lanes * length * width, like=like, what=f"a memory of {length:,} positions for {lanes:,} lanes"
        )
        return cls(
            layers=tuple(like.new_zeros(lanes, length, width) for _ in range(layers)),
            valid_B=torch.full((lanes,), length if full else 0, dtype=torch.int64),
            starts_full=full,
        )

    @property
    def lanes(self) -> int:
        return self.layers[0].shape[0]

    @property
    def length(self) -> int:
        return self.layers[0].shape[1]

    @property
    def ragged(self) -> bool:
        """Whether some lane has positions that are not real and must be hidden."""
        return bool((self.valid_B < self.length).any())

    def extended(self, hidden: Sequence[Tensor], *, limit: int) -> "Memory":
        """The last `limit` positions of this memory followed by `hidden`, one [B, T, D] for each layer. No gradient goes in."""
        added = hidden[0].shape[1]
        length = min(limit, self.length + added)
        kept = max(0, length - added)
        layers = tuple(
            torch.cat([old_BMD[:, old_BMD.shape[1] - kept :], new_BTD.detach()[:, added - (length - kept) :]], dim=1)
            for old_BMD, new_BTD in zip(self.layers, hidden, strict=True)
        )
        return replace(self, layers=layers, valid_B=(self.valid_B + added).clamp(max=length))

    def truncated(self, length: int) -> "Memory":
        """The newest `length` positions."""
        if length >= self.length:
            return self
        first = self.length - length
        return replace(
            self, layers=tuple(layer[:, first:] for layer in self.layers), valid_B=self.valid_B.clamp(max=length)
        )

    def reset(self, lanes: Sequence[int]) -> "Memory":
        """These lanes start anew, as for a new document; the others go on."""
        self._check_lanes(lanes)
        index = torch.as_tensor(lanes, dtype=torch.int64)
        layers = tuple(layer.index_fill(0, index.to(layer.device), 0.0) for layer in self.layers)
        valid_B = self.valid_B.index_fill(0, index, self.length if self.starts_full else 0)
        return replace(self, layers=layers, valid_B=valid_B)

    def limited(self, valid_B: Tensor) -> "Memory":
        """No lane remembers more than `valid_B` of its newest positions, as when a document began so many tokens ago."""
        return replace(self, valid_B=torch.minimum(self.valid_B, valid_B.clamp(min=0)))

    def select(self, lanes: Sequence[int]) -> "Memory":
        """These lanes, in this order; a lane named twice is forked."""
        self._check_lanes(lanes)
        index = torch.as_tensor(lanes, dtype=torch.int64)
        return replace(
            self, layers=tuple(layer[index.to(layer.device)] for layer in self.layers), valid_B=self.valid_B[index]
        )

    def to(self, device: torch.device | str | None = None, *, dtype: torch.dtype | None = None) -> "Memory":
        return replace(self, layers=tuple(layer.to(device=device, dtype=dtype) for layer in self.layers))

    def tensors(self) -> dict[str, Tensor]:
        """Everything as named tensors, for whoever writes it down; `from_tensors` reads it back."""
        named = {f"layer_{number}": layer.contiguous() for number, layer in enumerate(self.layers)}
        return {**named, "valid": self.valid_B, "starts_full": torch.tensor(self.starts_full)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Memory":
        layers = tuple(tensors[f"layer_{number}"] for number in range(len(tensors) - 2))
        return cls(layers=layers, valid_B=tensors["valid"], starts_full=bool(tensors["starts_full"]))

    def save(self, path: Path | str) -> None:
        with atomic_file(path) as file:
            file.write(save_tensors(self.tensors()))

    @classmethod
    def load(cls, path: Path | str) -> "Memory":
        try:
            return cls.from_tensors(load_tensors(Path(path).read_bytes()))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; save a memory there first") from None
        except (SafetensorError, KeyError):
            raise CheckpointError(f"{path} is not a saved memory, or is damaged; save it again") from None

    def _check_lanes(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            if not 0 <= lane < self.lanes:
                raise InputError(f"lane {lane} does not exist; this memory has lanes 0 to {self.lanes - 1}")
