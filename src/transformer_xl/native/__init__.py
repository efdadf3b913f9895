"""Builds the C++ of this folder on this machine, once, and calls it. Where that cannot be done, callers compute the same with torch's own operations.

Built by the C++ compiler that PyTorch itself would use, for exactly this processor, in seconds; kept in the user's cache folder under a name that
holds everything it depends on. It shares torch's OpenMP threads.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from transformer_xl.progress import say

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
DTYPES = {torch.float32: "float32", torch.float64: "float64"}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there is no compiler or the processor's vectors are not to be had."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or sys.platform != "linux":
        return None
    sources = sorted(FOLDER.glob("*.cpp")), sorted(FOLDER.glob("*.h"))
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, encoding="utf-8", errors="replace", check=False
    ).stdout
    recipe = "\n".join(
        (*(path.read_text(encoding="utf-8") for paths in sources for path in paths), *FLAGS, version, _processor())
    )
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transformer_xl"
    path = folder / f"kernels-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.so"
    try:
        if not path.exists():
            _build(compiler, sources[0], path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"the fast kernels could not be built ({_reason(error)}); work goes on without them, several times slower")
        return None


def usable(like: Tensor) -> bool:
    """Also not while torch records a graph, which must consist of its own operations."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return like.device.type == "cpu" and like.dtype in DTYPES and library() is not None


def call(name: str, dtype: torch.dtype, *arguments: object, threads: int | None = None) -> None:
    """`threads` at most, of torch's own number."""
    found = library()
    assert found is not None, "ask usable() first"
    most = torch.get_num_threads()
    getattr(found, f"{name}_{DTYPES[dtype]}")(*arguments, ctypes.c_int(most if threads is None else min(threads, most)))


def address(tensor: Tensor | None) -> int:
    """0 for what is not there, as C++ has it."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "kernels read contiguous tensors only"
    return tensor.data_ptr()


def at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(address(tensor))


def _build(compiler: str, sources: list[Path], path: Path) -> None:
    say("building the kernels for this processor (once, a few seconds)")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, *map(str, sources), "-o", str(made)]
        subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True)
        made.replace(path)


def _processor() -> str:
    """What -march=native looks at: a cache folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _reason(error: Exception) -> str:
    lines = (error.stderr or "").strip().splitlines() if isinstance(error, subprocess.CalledProcessError) else []
    return next((line for line in lines if "error" in line), lines[-1] if lines else str(error))
