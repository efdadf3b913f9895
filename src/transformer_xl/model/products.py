"""Products with weight matrices, forwards and backwards, by whichever of torch's own libraries uses all of this processor.

torch gives float32 products to MKL. On processors that are not Intel's, MKL leaves half of a 512-bit vector unused; oneDNN, which torch carries too, does
not: 270 GFLOP/s for 120 on one core of an AMD EPYC, in the same arithmetic. So there, and only there, oneDNN is asked. Which of the two depends on the
processor and the type alone, so that a run that was stopped goes on with the same bits.

Training may ask for factors rounded to bfloat16 (`rounded`): about twice as fast again on processors that multiply them. Sums, and all that is no product,
stay float32. Who learns while reading asks for that on the way back alone (`gradients_rounded`): losses are told as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

FEW_ROWS = 16
"""Up to so many, asking costs more than the product."""
WHOLE_ROWS = 64
"""oneDNN makes a program for every shape it meets, and keeps it. Training meets a few; who reads text of any length asks it for multiples of this alone."""


_asked = local()


def _about_processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@cache
def _onednn() -> Any:
    """oneDNN's product, where it is the faster one; None elsewhere."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch._C._has_mkldnn:
        return None
    about = _about_processor()
    if "vendor_id" not in about or "GenuineIntel" in about:
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for it, and torch the library that uses them. Elsewhere bfloat16 is slower than float32."""
    return torch._C._has_mkldnn and any(name in _about_processor() for name in ("avx512_bf16", "amx_bf16"))


@contextmanager
def rounded(to: torch.dtype | None) -> Iterator[None]:
    """Within, this thread's products of float32 matrices on a processor round their factors to bfloat16. None: they do not."""
    before = getattr(_asked, "rounded", None)
    _asked.rounded = to
    try:
        yield
    finally:
        _asked.rounded = before


@contextmanager
def gradients_rounded(to: torch.dtype | None) -> Iterator[None]:
    """Within, what this thread computes will round factors so when it is gone back through; what it computes itself stays as it is."""
    before = getattr(_asked, "gradients", None)
    _asked.gradients = to
    try:
        yield
    finally:
        _asked.gradients = before


@contextmanager
def computing_in(half: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Within, products are computed in `half` (None: in float32); norms, softmax sums, losses and positions never are."""
    if half is None or device.type == "cpu":
        with rounded(half):
            yield
    else:
        # Nothing is kept from call to call: an engine keeps its matrices in half precision itself, and a CUDA graph must not depend on others' tensors.
        with torch.autocast(device.type, dtype=half, cache_enabled=False):
            yield


def rounding(x: Tensor) -> torch.dtype | None:
    """What the factors of products with x are rounded to here and now, if they are."""
    return getattr(_asked, "rounded", None) if x.dtype == torch.float32 and x.is_cpu else None


def rounding_of_gradients(x: Tensor) -> torch.dtype | None:
    """The same on the way back, for what is computed with x here and now."""
    return getattr(_asked, "gradients", None) if x.dtype == torch.float32 and x.is_cpu else None


def _asks_onednn(x: Tensor, weight_OI: Tensor) -> bool:
    if x.dtype != torch.float32 or weight_OI.dtype != torch.float32 or not (x.is_cpu and weight_OI.is_cpu):
        return False
    if x.numel() <= FEW_ROWS * x.shape[-1] or torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return _onednn() is not None and not torch.is_autocast_enabled("cpu")


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """As F.linear, up to the rounding of float32, or of `rounded`."""
    if rounding(x) is not None:
        found: Tensor = _RoundedLinear.apply(x, weight_OI, bias_O)  # type: ignore[no-untyped-call]
        return found
    any_length = not torch.is_grad_enabled() and x.numel() % (WHOLE_ROWS * x.shape[-1])
    to = rounding_of_gradients(x) if torch.is_grad_enabled() else None
    if to is None and (any_length or not _asks_onednn(x, weight_OI)):
        return F.linear(x, weight_OI, bias_O)
    result: Tensor = _Linear.apply(x, weight_OI, bias_O, to)  # type: ignore[no-untyped-call]
    return result


def matmul(a_RC: Tensor, b_CX: Tensor, *, to: torch.dtype | None = None) -> Tensor:
    """The product of two matrices that need no gradient, of factors rounded `to`."""
    if to is not None and a_RC.dtype != to:
        return (a_RC.to(to) @ b_CX.to(to)).to(a_RC.dtype)
    return _onednn()(a_RC, b_CX.mT, None, "none", [], "") if _asks_onednn(a_RC, b_CX) else a_RC @ b_CX


def at_least_float32(values: Tensor) -> Tensor:
    """What is summed or compared: scores, logits."""
    return values if values.dtype == torch.float64 else values.float()


class LowRank(nn.Module):
    """A product of two thin matrices that is learned beside one that stands still (`adapters`)."""

    def __init__(self, *, rank: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down_RI = nn.Parameter(torch.empty(rank, inputs))
        self.up_OR = nn.Parameter(torch.zeros(outputs, rank))
        # So drawn, down^T down is 1 in the mean: a small step of `up` moves the product as one of the whole matrix would move that.
        nn.init.normal_(self.down_RI, 0.0, rank**-0.5)

    def forward(self, values: Tensor) -> Tensor:
        return linear(linear(values, self.down_RI), self.up_OR)


class Linear(nn.Linear):
    """nn.Linear by name and by weights; only its product is ours. In training an adapter may stand beside it."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.adapter: LowRank | None = None

    def forward(self, values: Tensor) -> Tensor:
        result = linear(values, self.weight, self.bias)
        return result if self.adapter is None else result + self.adapter(values)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, to: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.to = to
        if not _asks_onednn(x, weight_OI):
            return F.linear(x, weight_OI, bias_O)
        result: Tensor = _onednn()(x, weight_OI, bias_O, "none", [], "")
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight_OI = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        gradient_PO = gradient.reshape(-1, gradient.shape[-1])
        return (
            matmul(gradient_PO, weight_OI, to=ctx.to).view(x.shape) if of_x else None,
            matmul(gradient_PO.t(), x.reshape(-1, x.shape[-1]), to=ctx.to) if of_weight else None,
            gradient_PO.sum(0) if of_bias else None,
            None,
        )


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        x_PI, weight_OI = x.reshape(-1, x.shape[-1]).bfloat16(), weight_OI.bfloat16()
        ctx.save_for_backward(x_PI, weight_OI)
        ctx.shape = x.shape
        result_PO = (x_PI @ weight_OI.t()).float()
        if bias_O is not None:
            result_PO += bias_O
        return result_PO.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_PI, weight_OI = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        gradient_PO = gradient.reshape(-1, gradient.shape[-1])
        rounded_PO = gradient_PO.bfloat16()
        return (
            (rounded_PO @ weight_OI).float().view(ctx.shape) if of_x else None,
            (rounded_PO.t() @ x_PI).float() if of_weight else None,
            gradient_PO.sum(0) if of_bias else None,
        )
