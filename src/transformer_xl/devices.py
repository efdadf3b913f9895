"""Which device computes: the one that is named or, for `auto`, the fastest that is here. Knows no model; torch is imported when somebody asks."""

from typing import TYPE_CHECKING, Literal

from transformer_xl.errors import ConfigError

if TYPE_CHECKING:
    import torch

AUTO = "auto"
DEVICES_HELP = "auto (a GPU where there is one), cpu, cuda, cuda:1, mps"


def choose_device(name: str = AUTO) -> "torch.device":
    """`auto`: cuda, else mps, else cpu."""
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


def to_device(tensor: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """There, without waiting until the device has done what it was told before: CUDA has read ordinary memory when the call returns."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def computing_on(device: "torch.device") -> str:
    """A line for people."""
    import torch

    if device.type == "cuda":
        return f"computing on {device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return (
        f"computing on cpu, {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else f"computing on {device}"
    )
