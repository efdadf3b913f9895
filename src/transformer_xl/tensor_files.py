"""Tensors out of files that anybody may have written: compared with what is asked for before anything is made of them. Knows no model.

header -> names, types and shapes compared -> tensors (mapped, not copied) -> the file's own checksum right, every number finite
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_safetensors
from torch import Tensor

from transformer_xl.errors import CheckpointError
from transformer_xl.files import atomic_file, strange_file

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""What a model's weights may be, all of them alike: everything here runs in each of these, the compiled kernels in the first two."""
DTYPES = {
    **{"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool},
}
"""By safetensors' names; nothing of ours is written in any other."""
CHECKSUM = "sha256"


@dataclass(frozen=True)
class Kind:
    """What a tensor is, apart from its numbers."""

    dtype: torch.dtype | str
    """A word where it is none of DTYPES."""
    shape: tuple[int, ...]


def kinds_of(tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> dict[str, Kind]:
    """`dtype`: what those that are floating shall be instead."""
    return {
        name: Kind(dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def check_kinds(found: Mapping[str, Kind], wanted: Mapping[str, Kind], *, path: Path | str, asker: str) -> None:
    """Exactly the tensors wanted; otherwise a CheckpointError that names the first that is not so. `asker`: who wants them."""
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            raise CheckpointError(f"{path} lacks the tensor {name} that {asker} asks for")
        if name not in wanted:
            raise CheckpointError(f"{path} has a tensor {name} that {asker} does not know")
        here, asked = found[name], wanted[name]
        if here.shape != asked.shape:
            shapes = f"shape {list(here.shape)} where {asker} asks for {list(asked.shape)}"
            raise CheckpointError(f"{path}: {name} has {shapes}")
        if here.dtype != asked.dtype:
            types = f"{word_for(here.dtype)} where {word_for(asked.dtype)} is asked for"
            raise CheckpointError(f"{path}: {name} holds {types}")


def is_finite(tensor: Tensor) -> bool:
    """A sum is as fast as memory, and no number that is not finite hides in a finite one; only where it is not finite is each number looked at."""
    return not tensor.is_floating_point() or bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """An open file, of which no tensor has been read yet."""

    path: Path
    kinds: dict[str, Kind]
    metadata: dict[str, str]
    handle: Any = field(repr=False)

    def check(self, wanted: Mapping[str, Kind], *, asker: str, optional: Collection[str] = ()) -> None:
        """Those wanted and no others; of the `optional` any may be absent."""
        present = {name: kind for name, kind in wanted.items() if name in self.kinds or name not in optional}
        check_kinds(self.kinds, present, path=self.path, asker=asker)

    def check_metadata(self, known: Collection[str]) -> None:
        for name in self.metadata:
            if name not in (*known, CHECKSUM):
                raise CheckpointError(f"{self.path} has a field {name} in its header that is none of ours")

    def tensors(self) -> dict[str, Tensor]:
        """All of them, every number finite; where the file carries its checksum, that is right."""
        for name, kind in sorted(self.kinds.items()):
            if isinstance(kind.dtype, str):
                raise CheckpointError(f"{self.path}: {name} holds {kind.dtype}, which nothing here is made of")
        found = {name: self.handle.get_tensor(name) for name in sorted(self.kinds)}
        for name, tensor in found.items():
            # A header of odd length puts every number at an address where no program expects one.
            if tensor.data_ptr() % tensor.element_size():
                found[name] = tensor.clone()
        told = self.metadata.get(CHECKSUM)
        rest = {name: value for name, value in self.metadata.items() if name != CHECKSUM}
        if told is not None and told != checksum(found, rest):
            raise CheckpointError(f"{self.path} is damaged (its checksum is another); save it again, or use a copy")
        for name, tensor in found.items():
            if not is_finite(tensor):
                raise CheckpointError(
                    f"{self.path}: {name} holds numbers that are not finite, and so would all that is computed with it;"
                    " use an older copy"
                )
        return found


@contextmanager
def reading(path: Path | str, *, what: str) -> Iterator[TensorFile]:
    """`what` the file should be, for messages: `a saved engine`."""
    path = Path(path)
    if strange_file([path], links=True):
        raise CheckpointError(f"{path} is no plain file; there should be {what}")
    try:
        with safe_open(path, framework="pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (a handle is no mapping)
            kinds = {
                name: Kind(DTYPES.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape()))
                for name, part in slices.items()
            }
            yield TensorFile(path=path, kinds=kinds, metadata=handle.metadata() or {}, handle=handle)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; there should be {what}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); it is not {what}, or is damaged") from None


def write_tensors(
    path: Path | str, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """A file that stands alone, and therefore carries its own checksum."""
    told, here = dict(metadata or {}), {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    with atomic_file(path) as file:
        file.write(as_safetensors(here, {**told, CHECKSUM: checksum(here, told)}))


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Over everything that the file says: metadata, names, types, shapes and numbers."""
    kinds = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in sorted(tensors.items())]
    found = hashlib.sha256(json.dumps([sorted(metadata.items()), kinds]).encode())
    for _, tensor in sorted(tensors.items()):
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def word_for(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
