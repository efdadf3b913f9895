"""Numbers between the host and a device, while both go on: neither waits for the other until a number is really asked for."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def sent(numbers: np.ndarray, device: torch.device) -> Tensor:
    """On the device when what is queued there comes to need it. A copy out of ordinary memory would be waited for; pinned memory is read by the card itself."""
    found = torch.from_numpy(numbers)
    if device.type != "cuda":
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)


def sent_together(parts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    """Several rows of one type, by one copy."""
    if device.type == "cpu":
        return tuple(torch.from_numpy(part) for part in parts)
    return torch.split(sent(np.concatenate(parts), device), [len(part) for part in parts])


class Coming:
    """A few numbers on their way to the host. Reading them waits until the device has computed them, and for nothing that was queued after."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._numbers.tolist()
        return found
