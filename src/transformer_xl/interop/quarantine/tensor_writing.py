"""Numbers of a torch file or a tensor bundle -> one safetensors file, copied piece by piece. Runs where memory is scarce: no torch, little numpy."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from transformer_xl.errors import ImportRefused
from transformer_xl.interop.quarantine.stand_ins import DTYPES, TensorPlace
from transformer_xl.interop.quarantine.torch_files import TorchFile

CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """A tensor whose numbers lie in a row in some file."""

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]
    length: int
    strides: tuple[int, ...] | None = None
    """Where they do not lie in the order of the tensor; `length` then is that of the whole storage."""


def bytes_of(tensors: Mapping[str, TensorPlace], file: TorchFile) -> dict[str, Bytes]:
    found = {}
    for name, place in tensors.items():
        width = DTYPES[place.storage.dtype][1]
        begin, length = file.places[place.storage.key]
        begin += (place.storage.start + place.offset) * width
        contiguous = place.contiguous
        found[name] = Bytes(
            path=file.path,
            start=begin,
            dtype=place.storage.dtype,
            shape=place.shape,
            length=place.elements * width if contiguous else length - (begin - file.places[place.storage.key][0]),
            strides=None if contiguous else place.strides,
        )
    return found


def write_safetensors(path: Path, tensors: Mapping[str, Bytes]) -> None:
    header: dict[str, object] = {}
    position = 0
    for name, tensor in tensors.items():
        kind, width = DTYPES[tensor.dtype]
        count = width
        for size in tensor.shape:
            count *= size
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [position, position + count]}
        position += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for source, group in _by_file(tensors):
            with source.open("rb") as file:
                for tensor in group:
                    _copy(file, tensor, out)


def _by_file(tensors: Mapping[str, Bytes]) -> Iterable[tuple[Path, list[Bytes]]]:
    group: list[Bytes] = []
    for tensor in tensors.values():
        if group and group[-1].path != tensor.path:
            yield group[0].path, group
            group = []
        group.append(tensor)
    if group:
        yield group[0].path, group


def _copy(file: IO[bytes], tensor: Bytes, out: IO[bytes]) -> None:
    file.seek(tensor.start)
    if tensor.strides is not None:
        out.write(_gathered(file.read(tensor.length), tensor))
        return
    left = tensor.length
    while left:
        piece = file.read(min(CHUNK, left))
        if not piece:
            raise ImportRefused("it became shorter while it was read")
        out.write(piece)
        left -= len(piece)


def _gathered(data: bytes, tensor: Bytes) -> bytes:
    """The numbers in the tensor's own order. That they all lie in `data` was checked when the tensor was found."""
    import numpy as np

    width = DTYPES[tensor.dtype][1]
    words = np.frombuffer(data, dtype=f"V{width}", count=len(data) // width)
    assert tensor.strides is not None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    assert last < len(words)
    strides = tuple(stride * width for stride in tensor.strides)
    return np.lib.stride_tricks.as_strided(words, tensor.shape, strides, writeable=False).tobytes()
