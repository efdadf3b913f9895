"""Builds `kernels.cpp` on this machine, once, and calls it. Where that cannot be done the engine computes the same with torch's own operations.

Built by the C++ compiler that PyTorch itself would use, for exactly this processor, in a few seconds; kept in the user's cache folder under a
name that holds everything it depends on. It shares torch's OpenMP threads.
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

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
DTYPES = {torch.float32: "float32", torch.float64: "float64"}
BYTES_OF_A_THREAD = 1 << 19
"""Of one layer's matrices. Threads of a small model would spend their time waiting for each other, and much of it on a busy machine."""


class Sizes(ctypes.Structure):
    """The struct of the same name in kernels.cpp, field by field."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("layers", "lanes", "heads", "width", "model", "inner"),
            *("room", "end", "limit", "distances", "panels", "pre_norm"),
        )
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there is no compiler or the processor's vectors are not to be had."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or sys.platform != "linux":
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    recipe = "\n".join((SOURCE.read_text(), *FLAGS, version, _processor()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transformer_xl"
    path = folder / f"kernels-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.so"
    try:
        if not path.exists():
            _build(compiler, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        say(
            f"the fast kernels could not be built ({_reason(error)}); reading goes on without them, several times slower"
        )
        return None


def _build(compiler: str, path: Path) -> None:
    say("building the inference kernels for this processor (once, a few seconds)")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(made)], capture_output=True, text=True, check=True)
        made.replace(path)


def _processor() -> str:
    """What -march=native looks at: a cache folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _reason(error: Exception) -> str:
    lines = (error.stderr or "").strip().splitlines() if isinstance(error, subprocess.CalledProcessError) else []
    return next((line for line in lines if "error" in line), lines[-1] if lines else str(error))


def usable(like: Tensor) -> bool:
    return like.device.type == "cpu" and like.dtype in DTYPES and library() is not None


def panel_width(dtype: torch.dtype) -> int:
    """How many distances stand in one panel of relative keys."""
    return int(_library().panel_width(dtype.itemsize))


def step(sizes: Sizes, eps: float, layers: Tensor, hidden_BD: Tensor, lowest_B: Tensor) -> None:
    """One token of every lane through all layers; `hidden_BD` is changed in place."""
    matrices = sizes.model * (4 * sizes.heads * sizes.width + 2 * sizes.inner) * hidden_BD.element_size()
    pointers = (_at(part) for part in (layers, hidden_BD, lowest_B))
    threads = max(1, matrices // BYTES_OF_A_THREAD)
    _call("step", hidden_BD, ctypes.byref(sizes), ctypes.c_double(eps), *pointers, threads=threads)


def attend(sizes: Sizes, layer: Tensor, query_BTX: Tensor, key_value_BTX: Tensor, lowest_B: Tensor) -> Tensor:
    """Puts new keys and values, [B, T, 2*H*K], behind the kept ones; what each query, [B, T, H*K], gathers from all that it sees."""
    out_BTX = torch.empty_like(query_BTX)
    pointers = (_at(part) for part in (query_BTX, key_value_BTX, lowest_B, out_BTX))
    _call("attend", out_BTX, ctypes.byref(sizes), _at(layer), ctypes.c_int64(query_BTX.shape[1]), *pointers)
    return out_BTX


def linear(x_BI: Tensor, weight_OI: Tensor, scale_O: Tensor | None, bias_O: Tensor | None) -> Tensor:
    """A matrix, exact or as bytes with a scale for each row, times a few vectors."""
    B, rows, columns = x_BI.shape[0], *weight_OI.shape
    out_BO = x_BI.new_empty(B, rows)
    counts = (ctypes.c_int64(count) for count in (B, rows, columns))
    _call("linear", x_BI, _at(weight_OI), _at(scale_O), _at(bias_O), _at(x_BI), _at(out_BO), *counts)
    return out_BO


def address(tensor: Tensor | None) -> int:
    """0 for what is not there, as C++ has it."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "kernels read contiguous tensors only"
    return tensor.data_ptr()


def _at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(address(tensor))


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None, "ask usable() first"
    return found


def _call(name: str, like: Tensor, *arguments: object, threads: int | None = None) -> None:
    door = getattr(_library(), f"{name}_{DTYPES[like.dtype]}")
    most = torch.get_num_threads()
    door(*arguments, ctypes.c_int(most if threads is None else min(threads, most)))
