"""A card that is not there: tensors that say they are on `cuda:0` and have their numbers in this processor's memory, so that everything is still computed.

What lies on it is known by its storage: views, parameters and `.data` lie where what they show lies. Two of torch's modes do the rest, in every thread:

    functions    what a tensor says of itself and what moves it: `.device`, `is_cuda`, `.to`, `device=`, `.numpy()`
    operations   all tensors of one lie in one place, or it fails as CUDA fails; what CUDA would wait for is noted, with the place in our code

It is told as an older card (no Triton, no bfloat16 of its own) unless asked otherwise. Autocast on it rounds as autocast on a processor does.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import transformer_xl

SOURCE = Path(transformer_xl.__file__).parent
CARD = torch.device("cuda", 0)
CPU = torch.device("cpu")
READ = {"_local_scalar_dense", "equal", "is_nonzero"}
"""The host wants the number itself."""
SIZED = {"nonzero", "_unique", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "bincount", "_coalesce"}
"""How large the result is, only the numbers say."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
SAID = {"device", "is_cuda", "is_cpu"}


@dataclass(frozen=True)
class Wait:
    place: str
    """File below our source, and the function in it."""
    line: int
    why: str

    def __str__(self) -> str:
        return f"{self.place} (line {self.line}): {self.why}"


class Card:
    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self._storages: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}

    @contextmanager
    def counted(self) -> Iterator[list[Wait]]:
        """The waits within."""
        before, self.waits = self.waits, []
        try:
            yield self.waits
        finally:
            before += self.waits
            self.waits = before

    def holds(self, tensor: Tensor) -> bool:
        return self._key(tensor) in self._storages

    def take(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        # A reference that is kept keeps the address from being given to another storage.
        self._storages[storage._cdata] = StorageWeakRef(storage)
        if len(self._storages) % 4096 == 0:
            self._storages = {key: known for key, known in self._storages.items() if not known.expired()}
        return tensor

    def pin(self, tensor: Tensor) -> Tensor:
        """Memory of the host that the card reads and writes by itself, so that nobody waits for a copy."""
        storage = _storage(tensor)
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._key(tensor) in self._pinned

    def give(self, tensor: Tensor) -> Tensor:
        self._storages.pop(self._key(tensor), None)
        return tensor

    def wait(self, why: str) -> None:
        frame = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(SOURCE):
                # A comprehension belongs to the function it stands in.
                names = [part for part in frame.f_code.co_qualname.split(".") if not part.startswith("<")]
                place = f"{path.relative_to(SOURCE).as_posix()} {'.'.join(names)}"
                self.waits.append(Wait(place, frame.f_lineno, why))
                return
            frame = frame.f_back
        # Whoever asks from outside of our code, a test, may wait.

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return _storage(tensor)._cdata


def _storage(tensor: Tensor) -> Any:
    return (tensor._values() if tensor.layout == torch.sparse_coo else tensor).untyped_storage()


def _is_card(device: Any) -> bool:
    if isinstance(device, int):
        return True
    return device is not None and torch.device(device).type == CARD.type


class Functions(TorchFunctionMode):
    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, card = dict(kwargs or {}), self.card
        first = args[0] if args and isinstance(args[0], Tensor) else None
        name = getattr(func, "__name__", "")
        if name == "__get__":
            said = (resolve_name(func) or "").split(".")[-2]
            if said in SAID and first is not None and _is_plain(first):
                here = card.holds(first)
                return {"device": CARD if here else first.device, "is_cuda": here, "is_cpu": not here and first.is_cpu}[
                    said
                ]
            return func(*args, **kwargs)
        if first is not None and _is_plain(first):
            if name in ("to", "cpu", "cuda", "type_as"):
                return self._moved(first, name, args[1:], kwargs)
            if name == "get_device":
                return 0 if card.holds(first) else -1
            if name == "pin_memory":
                return card.pin(first.clone())
            if name == "is_pinned":
                return card.is_pinned(first)
            if name in ("numpy", "__array__", "__dlpack__") and card.holds(first):
                raise TypeError(
                    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
                )
            if name == "tolist" and card.holds(first):
                card.wait("tolist")
        if name == "new_tensor" and first is not None and card.holds(first) and "device" not in kwargs:
            kwargs["device"] = CARD
        if kwargs.pop("pin_memory", False):
            return card.pin(func(*args, **kwargs))
        if _is_card(kwargs.get("device")):
            if name in ("tensor", "as_tensor", "asarray", "new_tensor"):
                given = args[1 if name == "new_tensor" else 0]
                if not (isinstance(given, Tensor) and card.holds(given)):
                    card.wait(f"{name}(..., device=...) copies numbers of the host")
            kwargs["device"] = CPU
            return _each_tensor(func(*args, **kwargs), card.take)
        result = func(*args, **kwargs)
        made_like_it = kwargs.get("device") is None and (name.startswith("new_") or name.endswith("_like"))
        if made_like_it and first is not None and _is_plain(first) and card.holds(first):
            _each_tensor(result, card.take)
        return result

    def _moved(self, tensor: Tensor, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
        card, here = self.card, self.card.holds(tensor)
        non_blocking, there, other = bool(kwargs.pop("non_blocking", False)), here, None
        args = list(args)
        if name in ("cpu", "cuda"):
            there, args = name == "cuda", []
        elif (args and isinstance(args[0], Tensor)) or "other" in kwargs or name == "type_as":
            other = args.pop(0) if args else kwargs.pop("other")
            there = card.holds(other)
            args.insert(0, other.dtype)
        elif args and isinstance(args[0], str | torch.device | int) and not isinstance(args[0], bool):
            there = _is_card(args.pop(0))
        elif "device" in kwargs:
            asked = kwargs.pop("device")
            there = here if asked is None else _is_card(asked)
        elif args and args[0] is None:
            args.pop(0)
        if args and isinstance(args[-1], bool):
            non_blocking = args.pop() if len(args) < 3 else args.pop(-2)
        args = [one for one in args if one is not None]
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        result = tensor.to(*args, **kwargs) if args or kwargs else tensor
        if here == there:
            return result
        if _storage(result)._cdata == _storage(tensor)._cdata:
            result = result.clone()
        if here:
            card.wait(f"{name} copies to the host")
            return card.give(result)
        if not non_blocking:
            card.wait(f"{name} copies from the host and waits")
        return card.take(result)


class Operations(TorchDispatchMode):
    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, card = kwargs or {}, self.card
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and _is_plain(one)]
        here = [one for one in tensors if card.holds(one)]
        if not here:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name == "copy_":
            return self._copied(func, *args, **kwargs)
        self._check(name, func, args, kwargs, tensors)
        if name in READ:
            card.wait(name.replace("_local_scalar_dense", "a number is read"))
        if name in SIZED:
            card.wait(f"{name.strip('_')}: its size")
        if name in INDEXED:
            self._indexed(args)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            card.wait("repeat_interleave: its size")
        return _each_tensor(func(*args, **kwargs), card.take)

    def _check(self, name: str, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        elsewhere = [one for one in tensors if not self.card.holds(one)]
        if torch.Tag.pointwise in func.tags or name in INDEXED or name.startswith(("masked_fill", "fill", "where")):
            elsewhere = [one for one in elsewhere if one.dim()]
        if name in INDEXED and self.card.holds(args[0]):
            elsewhere = [one for one in elsewhere if not any(one is index for index in args[1])]
        if elsewhere:
            shapes = ", ".join(f"{list(one.shape)} on {'cuda:0' if self.card.holds(one) else 'cpu'}" for one in tensors)
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name}: {shapes})"
            )

    def _indexed(self, args: Any) -> None:
        for index in args[1]:
            if index is None:
                continue
            if not self.card.holds(index):
                self.card.wait("indexed by numbers of the host")
            elif index.dtype in (torch.bool, torch.uint8) and not (len(args) > 2 and args[2].numel() == 1):
                self.card.wait("indexed by a mask: its size")

    def _copied(self, func: Any, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if self.card.holds(into) != self.card.holds(source):
            if not self.card.holds(into):
                if not (non_blocking and self.card.is_pinned(into)):
                    self.card.wait("copy_ to the host")
            elif not non_blocking and source.dim():
                self.card.wait("copy_ from the host, which waits")
        return func(into, source, non_blocking)  # type: ignore[no-any-return]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout in (torch.strided, torch.sparse_coo)


def _each_tensor(result: Any, do: Any) -> Any:
    for one in tree_leaves(result):
        if isinstance(one, Tensor) and _is_plain(one):
            do(one)
    return result


class _Event:
    def __init__(self, card: Card) -> None:
        self.card = card

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        self.card.wait("until the card has come so far")


class _Autocast(torch.autocast):
    """On the card: as on a processor, whose numbers these are."""

    def __enter__(self) -> Any:
        self.beneath = torch.amp.autocast_mode.autocast("cpu", dtype=self.fast_dtype, enabled=self._enabled)
        if self.device == CARD.type:
            self.beneath.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        result = super().__exit__(*error)
        if self.device == CARD.type:
            self.beneath.__exit__(*error)
        return result


@contextmanager
def inserted(*, bfloat16: bool = False) -> Iterator[Card]:
    """A machine that has the card."""
    card, run, grouped = Card(), threading.Thread.run, torch._C._group_tensors_by_device_and_dtype
    nothing = torch.zeros(16, dtype=torch.uint8)

    def within(thread: threading.Thread) -> None:
        with Operations(card), Functions(card):
            run(thread)

    def throughout(called: Any) -> Any:
        """torch's way back leaves the mode of functions behind: what is Python there, our own gradients and layers computed again, takes it up."""

        def with_functions(*args: Any, **kwargs: Any) -> Any:
            if torch._C._len_torch_function_stack():
                return called(*args, **kwargs)
            with Functions(card):
                return called(*args, **kwargs)

        return with_functions

    def by_place(lists: Any, with_indices: bool = False) -> Any:
        """Of lists that lie on the card as a whole, or not at all."""
        found = grouped(lists, with_indices)
        first = next(one for one in tree_leaves(lists) if isinstance(one, Tensor))
        return {(CARD if card.holds(first) else device, dtype): group for (device, dtype), group in found.items()}

    told = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "a card that is not there",
        "get_device_capability": lambda device=None: (7, 0),
        "is_bf16_supported": lambda including_emulation=True: bfloat16,
        "get_rng_state": lambda device=None: nothing.clone(),
        "set_rng_state": lambda state, device=None: None,
        "mem_get_info": lambda device=None: (8 << 30, 16 << 30),
        "max_memory_allocated": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "synchronize": lambda device=None: card.wait("synchronize"),
        "Event": lambda **how: _Event(card),
    }
    with pytest.MonkeyPatch.context() as patch, ExitStack() as modes:
        for name, answer in told.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", by_place)
        patch.setattr(torch, "autocast", _Autocast)
        patch.setattr(torch.nn.Module, "__call__", throughout(torch.nn.Module.__call__))
        patch.setattr(BackwardCFunction, "apply", throughout(BackwardCFunction.apply))
        patch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
        patch.setattr(threading.Thread, "run", within)
        modes.enter_context(Operations(card))
        modes.enter_context(Functions(card))
        yield card
