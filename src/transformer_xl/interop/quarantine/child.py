"""Reads foreign files in a process of its own, whose memory, time and output are limited by the system. Started by `asking`, on the other side.

request.json   {"jobs": [{"role", "path"}, ...], "memory", "seconds", "bytes"}
-> ROLE.json and ROLE.safetensors for each job, or refused.json with the file and the sentence; unlimited where the system does not limit memory

Numbers are copied from file to file piece by piece, because memory is scarce here.
"""

import contextlib
import gc
import json
import mmap
import resource
from collections.abc import Mapping
from itertools import groupby
from math import prod
from pathlib import Path
from typing import IO, Any

from transformer_xl.errors import ImportRefused
from transformer_xl.interop.quarantine.extraction import extract
from transformer_xl.interop.quarantine.stand_ins import DTYPES, Bytes, TensorPlace
from transformer_xl.interop.quarantine.torch_files import read_torch_file

CHUNK = 1 << 22


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    gc.disable()  # a big vocabulary is a million values without a cycle
    limit(memory=request["memory"], seconds=request["seconds"], output=request["bytes"])
    if not memory_is_limited(request["memory"]):
        (folder / "unlimited").touch()
    read_jobs(request["jobs"], folder=folder)


def read_jobs(jobs: list[dict[str, str]], *, folder: Path) -> None:
    """Each file in turn, up to the first that is refused."""
    for job in jobs:
        path = Path(job["path"])
        try:
            read(path, role=job["role"], folder=folder)
            continue
        except ImportRefused as error:
            sentence = str(error)
        except MemoryError:
            sentence = "reading it takes more memory than a file of its size needs"
        except Exception as error:  # whatever a damaged file makes of us, it is the file that is refused
            sentence = f"no sense can be made of it ({type(error).__name__})"
        (folder / "refused.json").write_text(json.dumps({"path": str(path), "sentence": sentence}), encoding="utf-8")
        return


def read(path: Path, *, role: str, folder: Path) -> None:
    """The tensors first, the facts last: who finds the facts finds everything."""
    facts, tensors = _of_tensorflow(path) if role == "bundle" else _of_torch(path)
    write_safetensors(folder / f"{role}.safetensors", tensors)
    (folder / f"{role}.json").write_text(json.dumps(facts), encoding="utf-8")


def _of_torch(path: Path) -> tuple[dict[str, Any], dict[str, Bytes]]:
    file = read_torch_file(path)
    contents = extract(file.value)
    named = {f"{part}.{name}": place for part, places in contents.tensors.items() for name, place in places.items()}
    first: dict[TensorPlace, str] = {}
    aliases = {name: first[place] for name, place in named.items() if first.setdefault(place, name) != name}
    own = {name: file.bytes_of(place) for name, place in named.items() if name not in aliases}
    return {"kind": contents.kind, "aliases": aliases, **contents.facts}, own


def _of_tensorflow(path: Path) -> tuple[dict[str, Any], dict[str, Bytes]]:
    # Late, because it takes numpy, which torch's files do without.
    from transformer_xl.interop.quarantine.tensor_bundle import read_bundle

    variables = {f"model.{name}": tensor for name, tensor in read_bundle(path).items()}
    return {"kind": "tensorflow", "aliases": {}}, variables


def memory_is_limited(memory: int) -> bool:
    """Tried, not believed: macOS takes the limit and holds nobody to it. Pages that are not touched cost nothing."""
    try:
        mmap.mmap(-1, memory).close()
    except (OSError, ValueError, OverflowError, MemoryError):
        return True
    return False


def limit(*, memory: int, seconds: int, output: int) -> None:
    wanted = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: output,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in wanted.items():
        with contextlib.suppress(ValueError, OSError):  # a system that has no such limit
            resource.setrlimit(kind, (value, value))


# --- numbers out


def write_safetensors(path: Path, tensors: Mapping[str, Bytes]) -> None:
    header: dict[str, object] = {}
    position = 0
    for name, tensor in tensors.items():
        kind, width = DTYPES[tensor.dtype]
        count = width * prod(tensor.shape)
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [position, position + count]}
        position += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for source, group in groupby(tensors.values(), key=lambda tensor: tensor.path):
            with source.open("rb") as file:
                for tensor in group:
                    _copy(file, tensor, out)


def _copy(file: IO[bytes], tensor: Bytes, out: IO[bytes]) -> None:
    file.seek(tensor.start)
    if tensor.strides is not None:
        out.write(_gathered(file.read(tensor.length), tensor))
        return
    left = tensor.length
    while left:
        if not (piece := file.read(min(CHUNK, left))):
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
