"""A checkpoint in shards, for models that no one host can hold whole: each rank writes the rows it has, as safetensors, and an index says which rows those are.

    shards.json                            for each tensor its type, its whole shape, and how many of its rows each file has
    model-00001-of-00002.safetensors       rows 0 .. k of every weight        training-00001-of-00002.safetensors
    model-00002-of-00002.safetensors       rows k .. n                        training-00002-of-00002.safetensors

What is not sharded (counts, random states, memory) stands whole in the first file. Any number of ranks reads any number of files, each the rows it needs,
mapped and not copied. `txl export --to safetensors` makes one file of them, which is what is exchanged.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.errors import CheckpointError
from transformer_xl.files import write_json
from transformer_xl.tensor_files import DTYPES, Kind, TensorFile, check_kinds, reading

INDEX = "shards.json"
MOST_SHARDS = 99_999
MOST_INDEX_BYTES = 1 << 28
PARTS = ("model", "training")
WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Pieces:
    """A tensor whose rows stand in several files. As much of torch's tensors as those ask for who check what they are given."""

    parts: tuple[Tensor, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, start: int, stop: int) -> Tensor:
        found, first = [], 0
        for part in self.parts:
            begin, end = max(start - first, 0), min(stop - first, len(part))
            if begin < end:
                found.append(part[begin:end])
            first += len(part)
        return torch.cat(found) if found else torch.empty(0, *self.shape[1:], dtype=self.dtype)

    def whole(self) -> Tensor:
        return self.rows(0, self.shape[0])

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return prod(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def min(self) -> Tensor:
        return torch.stack([part.min() for part in self.parts if part.numel()]).min()


AnyTensor = Tensor | Pieces


def shard_name(part: str, number: int, count: int) -> str:
    return f"{part}-{number + 1:05d}-of-{count:05d}.safetensors"


def row_counts(rows: int, count: int) -> list[int]:
    """Of how many rows of a tensor each rank has: equal shares, rounded up, as long as there are any (torch.chunk, and so FSDP2)."""
    share = -(-rows // count)
    return [max(0, min(share, rows - share * number)) for number in range(count)]


def write_index(folder: Path, tensors: Mapping[str, Mapping[str, tuple[Kind, bool]]], *, count: int) -> None:
    """`tensors`: what each is as a whole, and whether it is in rows."""
    parts = {
        part: {
            name: {
                "dtype": WORDS[kind.dtype],  # type: ignore[index]
                "shape": list(kind.shape),
                "rows": row_counts(kind.shape[0], count) if in_rows else None,
            }
            for name, (kind, in_rows) in sorted(kinds.items())
        }
        for part, kinds in tensors.items()
    }
    write_json(folder / INDEX, {"count": count, **parts})


# --- read back, where anybody may have written it


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Open files that are one: `TensorFile`, of several."""

    path: Path
    kinds: dict[str, Kind]
    rows: dict[str, tuple[int, ...] | None]
    files: tuple[TensorFile, ...]

    def check(self, wanted: Mapping[str, Kind], *, asker: str, optional: Collection[str] = ()) -> None:
        present = {name: kind for name, kind in wanted.items() if name in self.kinds or name not in optional}
        check_kinds(self.kinds, present, path=self.path, asker=asker)

    def tensors(self) -> dict[str, Any]:
        """Pieces, or whole tensors where they are not in rows; every number finite."""
        read = [file.tensors() for file in self.files]
        found: dict[str, AnyTensor] = {}
        for name, kind in sorted(self.kinds.items()):
            rows = self.rows[name]
            if rows is None:
                found[name] = read[0][name]
                continue
            assert isinstance(kind.dtype, torch.dtype)
            parts = tuple(tensors[name] for tensors, count in zip(read, rows, strict=True) if count)
            found[name] = Pieces(parts, kind.shape, kind.dtype)
        return found


@contextmanager
def reading_whole_or_shards(path: Path, *, what: str) -> Iterator[TensorFile | Shards]:
    """A file or, where it is not there, the shards of it."""
    folder, part = path.parent, path.stem
    if path.exists() or part not in PARTS or not (folder / INDEX).is_file():
        with reading(path, what=what) as file:
            yield file
        return
    count, index = _read_index(folder / INDEX, part)
    with ExitStack() as stack:
        paths = [folder / shard_name(part, number, count) for number in range(count)]
        files = [stack.enter_context(reading(path, what=f"a shard of {what}")) for path in paths]
        for number, file in enumerate(files):
            file.check_metadata(())
            file.check(dict(_expected(index, number)), asker=INDEX)
        kinds = {name: kind for name, (kind, _) in index.items()}
        rows = {name: rows for name, (_, rows) in index.items()}
        yield Shards(path=folder / INDEX, kinds=kinds, rows=rows, files=tuple(files))


def whole_tensors(tensors: Mapping[str, AnyTensor]) -> dict[str, Tensor]:
    return {name: value.whole() if isinstance(value, Pieces) else value for name, value in tensors.items()}


Index = dict[str, tuple[Kind, tuple[int, ...] | None]]


def _expected(index: Index, number: int) -> Iterator[tuple[str, Kind]]:
    """What the file of this number must hold."""
    for name, (kind, rows) in index.items():
        if rows is None and number == 0:
            yield name, kind
        elif rows is not None and rows[number]:
            yield name, Kind(kind.dtype, (rows[number], *kind.shape[1:]))


def _read_index(path: Path, part: str) -> tuple[int, Index]:
    """All of it is checked, before any file is opened by it."""
    try:
        if path.stat().st_size > MOST_INDEX_BYTES:
            raise ValueError("it is larger than any of ours")
        found = json.loads(path.read_text(encoding="utf-8"))
        count, tensors = found["count"], found[part]
        if found.keys() != {"count", "model", "training"} or type(count) is not int or not 1 <= count <= MOST_SHARDS:
            raise ValueError("it does not say how many shards there are")
        return count, {name: _read_entry(name, entry, count) for name, entry in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); use an older checkpoint of the run, or a copy") from None


def _read_entry(name: str, entry: Mapping[str, Any], count: int) -> tuple[Kind, tuple[int, ...] | None]:
    if entry.keys() != {"dtype", "shape", "rows"} or entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has no type that we know, or other fields than dtype, shape and rows")
    shape, rows = entry["shape"], entry["rows"]
    if not _sizes(shape) or not (rows is None or _sizes(rows)):
        raise ValueError(f"the shape or the rows of {name} are no list of sizes")
    if rows is not None and (not shape or len(rows) != count or sum(rows) != shape[0]):
        raise ValueError(f"the rows of {name} do not make up its shape")
    return Kind(DTYPES[entry["dtype"]], tuple(shape)), None if rows is None else tuple(rows)


def _sizes(found: object) -> bool:
    return isinstance(found, Sequence) and all(type(size) is int and 0 <= size < 1 << 53 for size in found)
