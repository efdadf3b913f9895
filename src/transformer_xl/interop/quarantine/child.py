"""Reads foreign files in a process of its own, whose memory, time and output are limited by the system. No torch in here.

request.json   {"jobs": [{"role", "path"}, ...], "memory", "seconds", "bytes"}
-> ROLE.json and ROLE.safetensors for each job, or refused.json with the file and the sentence; unlimited where the system does not limit memory
"""

import contextlib
import gc
import json
import mmap
import resource
from pathlib import Path
from typing import Any

from transformer_xl.errors import ImportRefused
from transformer_xl.interop.quarantine.extraction import extract
from transformer_xl.interop.quarantine.stand_ins import TensorPlace
from transformer_xl.interop.quarantine.tensor_writing import bytes_of, write_safetensors
from transformer_xl.interop.quarantine.torch_files import read_torch_file


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
        except ImportRefused as error:
            refuse(folder, path, str(error))
            return
        except MemoryError:
            refuse(folder, path, "reading it takes more memory than a file of its size needs")
            return
        except Exception as error:  # whatever a damaged file makes of us, it is the file that is refused
            refuse(folder, path, f"no sense can be made of it ({type(error).__name__})")
            return


def read(path: Path, *, role: str, folder: Path) -> None:
    """The tensors first, the facts last: who finds the facts finds everything."""
    target = folder / f"{role}.safetensors"
    if role == "bundle":
        from transformer_xl.interop.quarantine.tensor_bundle import (
            read_bundle,  # with numpy, which the other formats do without
        )

        tensors = read_bundle(path)
        write_safetensors(target, tensors)
        facts: dict[str, Any] = {"kind": "tensorflow", "aliases": {}}
    else:
        file = read_torch_file(path)
        found = extract(file.value)
        first: dict[TensorPlace, str] = {}
        aliases = {name: first[place] for name, place in found.tensors.items() if first.setdefault(place, name) != name}
        own = {name: place for name, place in found.tensors.items() if name not in aliases}
        write_safetensors(target, bytes_of(own, file))
        facts = {"kind": found.kind, "aliases": aliases, **found.facts}
    (folder / f"{role}.json").write_text(json.dumps(facts), encoding="utf-8")


def refuse(folder: Path, path: Path, sentence: str) -> None:
    (folder / "refused.json").write_text(json.dumps({"path": str(path), "sentence": sentence}), encoding="utf-8")


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
