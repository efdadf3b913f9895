"""A device that is not there: tensors that say they are elsewhere and have their numbers here, so that everything is still computed, and a tensor of the
processor among them is found on any machine, as a card would refuse it.

For reading alone, in one thread. What CUDA allows is allowed: single numbers and indices of the processor, and whatever moves tensors.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import transformer_xl

LABEL = torch.device("mps")
"""What the tensors say. Any but cuda would do: that one torch looks for."""
SOURCE = Path(transformer_xl.__file__).parent
MOVES = {"copy_", "_to_copy", "to"}
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Elsewhere(Tensor):
    """To torch itself on meta, the only device of which it has no driver to look for."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "Elsewhere":
        how: dict[str, Any] = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        found: Elsewhere = Tensor._make_wrapper_subclass(cls, here.shape, **how, device=torch.device("meta"))
        found.here = here
        return found

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return LABEL

    def data_ptr(self) -> int:
        return self.here.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} met a tensor of a pretended device outside of it")


class Made(TorchFunctionMode):
    """`torch.tensor(..., device=...)` asks a device for room before any operation is seen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        asked = kwargs.get("device")
        if func is torch.tensor and asked is not None and torch.device(asked) == LABEL:
            return func(*args, **{**kwargs, "device": "cpu"}).to(LABEL)
        return func(*args, **kwargs)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mixed: dict[str, str] = {}
        """What was computed of tensors of both places, by the place in our code."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        leaves = tree_leaves(given)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        asked = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        away = {id(tensor.here): tensor for tensor in tensors if isinstance(tensor, Elsewhere)}
        name = func.__name__.split(".")[0]
        if away and name not in MOVES:
            looked_at = tensors[:1] if name in INDEXES else tensors
            if any(tensor.dim() and not isinstance(tensor, Elsewhere) for tensor in looked_at):
                self.mixed.setdefault(_place(), name)
        goes = asked[0].type != "cpu" if asked else bool(away)
        args, kwargs = tree_map(_here, given)

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in away:  # the very tensor that went in
                return away[id(value)] if goes else value.clone()
            return Elsewhere(value) if goes else value

        return tree_map(placed, func(*args, **kwargs))


def _here(value: Any) -> Any:
    if isinstance(value, Elsewhere):
        return value.here
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _place() -> str:
    """Where in our own code."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(SOURCE) and path.name != Path(__file__).name:
            return f"{path.relative_to(SOURCE).as_posix()}:{frame.lineno}"
    return "outside of our code"


@contextmanager
def elsewhere(model: nn.Module) -> Iterator[Operations]:
    """Within, the model is on a device that is not there, and reads; afterwards it is of no use."""
    with torch.inference_mode(), Made(), Operations() as seen:
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(Elsewhere(weight.detach()), requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = Elsewhere(buffer)
        yield seen
