"""Memory as a value: the inputs of the N layers at past positions, detached, oldest first. Passed in, returned, never stored on a module.

lane 0    . . . a b c      valid 3: the buffer is as long for every lane, and the
lane 1    u v w x y z      valid 6  last `valid` positions of a lane are real
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from transformer_xl.devices import to_device
from transformer_xl.errors import CheckpointError, InputError, shown
from transformer_xl.tensor_files import reading, write_tensors


def check_fits(
    numbers: int, *, like: Tensor, what: str, way_out: str = "give a smaller `memory=`, or fewer lanes"
) -> None:
    """Refuses what is larger than the whole machine. A length may come with a file, where no tensor bounds it."""
    if like.device.type != "cpu" or not hasattr(os, "sysconf"):
        return
    needed, there = numbers * like.itemsize, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise InputError(
            f"{what} takes {shown(needed // 10**9)} GB, and this machine has {there // 10**9:,}; {way_out}"
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    layers: tuple[Tensor, ...]
    """One [B, M, D] for each layer."""
    valid_B: Tensor
    """How many positions of each lane are real. Lives on the CPU: how full a lane is never depends on a device's work."""
    recent_BP: Tensor | None = None
    """The last tokens of each lane, -1 where there are none: for models that embed runs of tokens (`ngrams`), however long their memory. None: for all others."""
    starts_full: bool = False
    """A fresh lane is made of zeros that are attended to, instead of being empty."""

    @classmethod
    def start(
        cls, *, layers: int, lanes: int, length: int, width: int, like: Tensor, full: bool = False, recent: int = 0
    ) -> "Memory":
        """Memory before the first token. `length` 0 grows as tokens come; the full length gives one shape from the start. `recent`: last tokens it keeps."""
        check_fits(
            layers * lanes * length * width,
            like=like,
            what=f"a memory of {shown(length)} positions for {shown(lanes)} lanes",
        )
        return cls(
            layers=tuple(like.new_zeros(lanes, length, width) for _ in range(layers)),
            valid_B=torch.full((lanes,), length if full else 0, dtype=torch.int64),
            recent_BP=torch.full((lanes, recent), -1, dtype=torch.int64, device=like.device) if recent else None,
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

    def extended(self, hidden: Sequence[Tensor], *, limit: int, tokens_BT: Tensor | None = None) -> "Memory":
        """The last `limit` positions of this memory followed by `hidden`, one [B, T, D] for each layer, and by their tokens. No gradient goes in."""
        added = hidden[0].shape[1]
        length = min(limit, self.length + added)
        kept = max(0, length - added)
        layers = tuple(
            torch.cat([old_BMD[:, old_BMD.shape[1] - kept :], new_BTD.detach()[:, added - (length - kept) :]], dim=1)
            for old_BMD, new_BTD in zip(self.layers, hidden, strict=True)
        )
        recent_BP = self.recent_BP
        if recent_BP is not None:
            assert tokens_BT is not None
            recent_BP = torch.cat([recent_BP, tokens_BT], dim=1)[:, tokens_BT.shape[1] :]
        valid_B = (self.valid_B + added).clamp(max=length)
        return replace(self, layers=layers, valid_B=valid_B, recent_BP=recent_BP)

    def truncated(self, length: int) -> "Memory":
        """The newest `length` positions."""
        if length >= self.length:
            return self
        first = self.length - length
        return replace(
            self,
            layers=tuple(layer[:, first:] for layer in self.layers),
            valid_B=self.valid_B.clamp(max=length),
        )

    def reset(self, lanes: Sequence[int]) -> "Memory":
        """These lanes start anew, as for a new document; the others go on."""
        self._check_lanes(lanes)
        index = torch.as_tensor(lanes, dtype=torch.int64)
        there = to_device(index, self.layers[0].device)
        layers = tuple(layer.index_fill(0, there, 0.0) for layer in self.layers)
        valid_B = self.valid_B.index_fill(0, index, self.length if self.starts_full else 0)
        recent_BP = self.recent_BP
        if recent_BP is not None:
            recent_BP = recent_BP.index_fill(0, there, -1)
        return replace(self, layers=layers, valid_B=valid_B, recent_BP=recent_BP)

    def limited(self, valid_B: Tensor) -> "Memory":
        """No lane remembers more than `valid_B` of its newest positions, as when a document began so many tokens ago."""
        valid_B = valid_B.clamp(min=0)
        recent_BP = self.recent_BP
        if recent_BP is not None:
            age_P = torch.arange(recent_BP.shape[1], 0, -1, device=recent_BP.device)
            recent_BP = recent_BP.masked_fill(age_P > to_device(valid_B[:, None], recent_BP.device), -1)
        return replace(self, valid_B=torch.minimum(self.valid_B, valid_B), recent_BP=recent_BP)

    def select(self, lanes: Sequence[int]) -> "Memory":
        """These lanes, in this order; a lane named twice is forked."""
        self._check_lanes(lanes)
        index = torch.as_tensor(lanes, dtype=torch.int64)
        there = to_device(index, self.layers[0].device)
        recent_BP = None if self.recent_BP is None else self.recent_BP[there]
        layers = tuple(layer[there] for layer in self.layers)
        return replace(self, layers=layers, valid_B=self.valid_B[index], recent_BP=recent_BP)

    def to(self, device: torch.device | str | None = None, *, dtype: torch.dtype | None = None) -> "Memory":
        recent_BP = None if self.recent_BP is None else self.recent_BP.to(device=device)
        layers = tuple(layer.to(device=device, dtype=dtype) for layer in self.layers)
        return replace(self, layers=layers, recent_BP=recent_BP)

    def tensors(self) -> dict[str, Tensor]:
        """Everything as named tensors, for whoever writes it down; `from_tensors` reads it back."""
        named = {f"layer_{number}": layer.contiguous() for number, layer in enumerate(self.layers)}
        if self.recent_BP is not None:
            named["recent"] = self.recent_BP.contiguous()
        return {**named, "valid": self.valid_B, "starts_full": torch.tensor(self.starts_full)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Memory":
        """They may come from a file: what makes no memory is an InputError."""
        beside = ("valid", "starts_full", *(name for name in ("recent",) if name in tensors))
        layers, starts_full = in_order(tensors, beside=beside), tensors["starts_full"]
        if starts_full.dtype != torch.bool or starts_full.dim():
            raise InputError(f"memory: starts_full is {starts_full.dtype} {list(starts_full.shape)}, not true or false")
        recent_BP = tensors.get("recent")
        memory = cls(layers=layers, valid_B=tensors["valid"], recent_BP=recent_BP, starts_full=bool(starts_full))
        memory.check()
        return memory

    def check(self) -> None:
        """Layers of one shape, and as many real positions as there can be: a program or a file may put anything together, and the kernels trust it."""
        shape = self.layers[0].shape if self.layers else torch.Size()
        if len(shape) != 3 or not shape[0]:
            raise InputError(f"memory: layer 0 has shape {list(shape)}, where a memory has [lanes, positions, width]")
        for number, layer in enumerate(self.layers):
            if layer.shape != shape or not layer.is_floating_point():
                raise InputError(
                    f"memory: layer {number} is {layer.dtype} {list(layer.shape)}, where layer 0 has shape {list(shape)} and all are floating"
                )
        valid_B = self.valid_B
        if valid_B.dtype != torch.int64 or valid_B.shape != shape[:1] or valid_B.device.type != "cpu":
            raise InputError(
                f"memory: valid is {valid_B.dtype} {list(valid_B.shape)} on {valid_B.device}, where one int64 for each of {shape[0]} lanes is"
                " expected, on the CPU"
            )
        if bool(((valid_B < 0) | (valid_B > shape[1])).any()):
            outside = next(int(valid) for valid in valid_B if not 0 <= valid <= shape[1])
            raise InputError(
                f"memory: valid is {outside} in a memory of {shape[1]} positions; it must be from 0 to that"
            )
        recent_BP = self.recent_BP
        if recent_BP is not None and (
            recent_BP.dtype != torch.int64 or recent_BP.dim() != 2 or len(recent_BP) != shape[0]
        ):
            raise InputError(
                f"memory: recent is {recent_BP.dtype} {list(recent_BP.shape)}, where some int64 for each of {shape[0]} lanes are expected"
            )

    def save(self, path: Path | str) -> None:
        write_tensors(path, self.tensors())

    @classmethod
    def load(cls, path: Path | str) -> "Memory":
        """Any that was saved; whether it fits, the model says that is given it."""
        with reading(path, what="a saved memory") as file:
            file.check_metadata(())
            tensors = file.tensors()
        try:
            return cls.from_tensors(tensors)
        except InputError as error:
            raise CheckpointError(f"{path} is not a saved memory, or is damaged ({error}); save it again") from None

    def _check_lanes(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            if not 0 <= lane < self.lanes:
                raise InputError(f"lane {lane} does not exist; this memory has lanes 0 to {self.lanes - 1}")


def in_order(tensors: Mapping[str, Tensor], *, beside: Collection[str] = ()) -> tuple[Tensor, ...]:
    """layer_0, layer_1, ... of a memory's tensors, which must be there without a gap, and nothing but them and those `beside`."""
    names = [f"layer_{number}" for number in range(len(tensors) - len(beside))]
    for name in sorted(tensors.keys() ^ {*names, *beside}):
        raise InputError(f"memory: {name} is {'one tensor too many' if name in tensors else 'missing'}")
    return tuple(tensors[name] for name in names)
