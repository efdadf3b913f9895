"""The doors to `native/inference.cpp`: one token through every layer, many through one attention, a matrix times a few vectors."""

import ctypes

import torch
from torch import Tensor

from transformer_xl import native
from transformer_xl.native import address, at, usable

__all__ = ["Sizes", "address", "attend", "linear", "panel_width", "step", "usable"]

BYTES_OF_A_THREAD = 1 << 19
"""Of one layer's matrices. Threads of a small model would spend their time waiting for each other, and much of it on a busy machine."""


class Sizes(ctypes.Structure):
    """The struct of the same name in inference.cpp, field by field."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("layers", "lanes", "heads", "width", "model", "inner"),
            *("room", "end", "limit", "distances", "panels", "pre_norm"),
        )
    )


def panel_width(dtype: torch.dtype) -> int:
    """How many distances stand in one panel of relative keys."""
    found = native.library()
    assert found is not None, "ask usable() first"
    return int(found.panel_width(dtype.itemsize))


def step(sizes: Sizes, eps: float, layers: Tensor, hidden_BD: Tensor, lowest_B: Tensor) -> None:
    """One token of every lane through all layers; `hidden_BD` is changed in place."""
    matrices = sizes.model * (4 * sizes.heads * sizes.width + 2 * sizes.inner) * hidden_BD.element_size()
    pointers = (at(part) for part in (layers, hidden_BD, lowest_B))
    threads = max(1, matrices // BYTES_OF_A_THREAD)
    native.call("step", hidden_BD.dtype, ctypes.byref(sizes), ctypes.c_double(eps), *pointers, threads=threads)


def attend(sizes: Sizes, layer: Tensor, query_BTX: Tensor, key_value_BTX: Tensor, lowest_B: Tensor) -> Tensor:
    """Puts new keys and values, [B, T, 2*H*K], behind the kept ones; what each query, [B, T, H*K], gathers from all that it sees."""
    out_BTX = torch.empty_like(query_BTX)
    pointers = (at(part) for part in (query_BTX, key_value_BTX, lowest_B, out_BTX))
    length = ctypes.c_int64(query_BTX.shape[1])
    native.call("attend", out_BTX.dtype, ctypes.byref(sizes), at(layer), length, *pointers)
    return out_BTX


def linear(x_BI: Tensor, weight_OI: Tensor, scale_O: Tensor | None, bias_O: Tensor | None) -> Tensor:
    """A matrix, exact or as bytes with a scale for each row, times a few vectors."""
    B, rows, columns = x_BI.shape[0], *weight_OI.shape
    out_BO = x_BI.new_empty(B, rows)
    counts = (ctypes.c_int64(count) for count in (B, rows, columns))
    native.call("linear", x_BI.dtype, at(weight_OI), at(scale_O), at(bias_O), at(x_BI), at(out_BO), *counts)
    return out_BO
