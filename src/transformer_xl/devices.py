"""Which device computes, and in what: the ones that are named or, for `auto`, the fastest that are here. Knows no model; torch is imported when somebody asks."""

import os
from typing import TYPE_CHECKING, Literal

from transformer_xl.errors import ConfigError

if TYPE_CHECKING:
    import torch

AUTO = "auto"
Precision = Literal["auto", "float32", "bfloat16", "float16"]
PRECISIONS: tuple[Precision, ...] = ("auto", "float32", "bfloat16", "float16")
PRECISION_HELP = "of products alone: float32, bfloat16, float16, or auto (bfloat16 on a GPU that computes in it)"
TF32_SINCE = (8, 0)
"""Compute capability."""
TF32_SWITCH = "NVIDIA_TF32_OVERRIDE"
"""NVIDIA's own: 0 switches TF32 off for every program."""
DEVICES_HELP = "auto (a GPU where there is one), cpu, cuda, cuda:1, mps"


def choose_device(name: str = AUTO) -> "torch.device":
    """`auto`: cuda, else mps, else cpu. Where it has TF32, this process's float32 products may use that from now on."""
    device = _named(name)
    if device.type == "cuda":
        _allow_tf32(device)
    return device


def _allow_tf32(device: "torch.device") -> None:
    """Factors rounded to 11 bits, sums in float32, eight times as fast; anybody who has chosen for torch has chosen."""
    import torch

    has = torch.version.hip is None and torch.cuda.get_device_capability(device) >= TF32_SINCE
    if has and os.environ.get(TF32_SWITCH) != "0" and torch.get_float32_matmul_precision() == "highest":
        torch.set_float32_matmul_precision("high")


def _named(name: str) -> "torch.device":
    import torch

    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == AUTO:
        return torch.device(next(kind for kind, is_here in here.items() if is_here))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"`device=` {name!r} is no device; give auto, cpu, cuda, cuda:1 or mps") from None
    if not here.get(device.type, False):
        raise ConfigError(f"`device=` {name} is not here, or this torch cannot use it; give auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"`device=` {name} is not here: there are {torch.cuda.device_count()}, counted from 0")
    return device


def choose_precision(device: "torch.device") -> Literal["float32", "bfloat16"]:
    """bfloat16 where the device computes in it faster than in float32, and needs no scaling."""
    import torch

    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if fast else "float32"


def free_bytes(device: "torch.device") -> int:
    """What of a device's memory nobody has taken, or only torch has and would use again. 0 for a device that does not tell."""
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return 0


def half_of(precision: Precision, device: "torch.device") -> "torch.dtype | None":
    """What products are computed in there, where it is less than float32."""
    import torch

    if precision not in PRECISIONS:
        raise ConfigError(f"`precision=` {precision!r} is unknown; give {', '.join(PRECISIONS)}")
    if precision == "float16" and device.type == "cpu":
        raise ConfigError("`precision=` float16 is for GPUs; a processor reads in float32 or bfloat16")
    chosen = choose_precision(device) if precision == "auto" else precision
    return {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[chosen]


def to_device(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """There, without waiting until the device has done what it was told before: CUDA has read ordinary memory when the call returns."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def computing_on(device: "torch.device", *, half: "torch.dtype | None" = None) -> str:
    """A line for people. `half`: what products are in, where it is less than float32."""
    import torch

    rounded = "" if half is None else f", in {str(half).removeprefix('torch.')}"
    if device.type == "cuda":
        tf32 = torch.get_float32_matmul_precision() != "highest"
        rounded = f"{rounded}, float32 products in TF32 ({TF32_SWITCH}=0: exact)" if tf32 else rounded
        return f"computing on {device} ({torch.cuda.get_device_name(device)}){rounded}"
    threads = torch.get_num_threads()
    told = f", {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else ""
    return f"computing on {device}{told}{rounded}"
