"""A matrix times vectors, as an engine wants it: exact, or from weights kept as bytes; by the kernels where the vectors are few, by torch where they
are many."""

from typing import Literal

import torch
from torch import Tensor

from transformer_xl import native
from transformer_xl.model import products

WeightKind = Literal["exact", "int8"]


class Linear:
    """Called as F.linear. Bytes are made of a matrix when it is first used: each row has its own scale, its largest weight becomes 127."""

    def __init__(self, kind: WeightKind, *, compiled: bool, half: torch.dtype | None = None) -> None:
        """`half`: what matrices are kept in that are not kept as bytes, where products are computed in it."""
        self.kind = kind
        self.compiled = compiled
        self.half = half
        self._kept: dict[tuple[int, torch.Size], tuple[Tensor, Tensor | None, Tensor]] = {}
        self._turned: dict[tuple[int, torch.Size], tuple[Tensor, Tensor]] = {}
        """By where a matrix lies; each ends with the matrix itself, so that no other can come to lie there."""

    def __call__(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return self._product(x, *self.stored(weight_OI), bias_O)

    def exact(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """Never from bytes."""
        return self._product(x, weight_OI.detach(), None, bias_O)

    def _product(self, x: Tensor, kept_OI: Tensor, scale_O: Tensor | None, bias_O: Tensor | None) -> Tensor:
        if self.compiled and 0 < x.numel() <= native.FEW * kept_OI.shape[1]:
            rows_PI = x.reshape(-1, x.shape[-1]).contiguous()
            out_PO = native.linear(rows_PI, self._contiguous(kept_OI), scale_O, bias_O)
            return out_PO.view(*x.shape[:-1], -1)
        return products.linear(x, kept_OI if scale_O is None else kept_OI * scale_O[:, None], bias_O)

    def _contiguous(self, kept_OI: Tensor) -> Tensor:
        """A transposed view as a matrix of its own: it is small, and the kernels read rows."""
        if kept_OI.is_contiguous():
            return kept_OI
        key = (kept_OI.data_ptr(), kept_OI.shape)
        if key not in self._turned:
            self._turned[key] = (kept_OI.contiguous(), kept_OI)
        return self._turned[key][0]

    def stored(self, weight_OI: Tensor) -> tuple[Tensor, Tensor | None]:
        """The matrix as it is read: itself, or in half precision, and no scale; or bytes and a scale for each row. A transposed view is small and stays."""
        if (self.kind == "exact" and self.half is None) or not weight_OI.is_contiguous():
            return weight_OI.detach(), None
        key = (weight_OI.data_ptr(), weight_OI.shape)
        if key not in self._kept and self.kind == "exact":
            self._kept[key] = (weight_OI.detach().to(self.half), None, weight_OI)
        elif key not in self._kept:
            scale_O = (weight_OI.detach().abs().amax(dim=1) / 127).clamp(min=1e-12)
            bytes_OI = (weight_OI.detach() / scale_O[:, None]).round().to(torch.int8)
            self._kept[key] = (bytes_OI, scale_O, weight_OI)
        return self._kept[key][:2]
