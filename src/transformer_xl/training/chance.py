"""A chance of its own for each training. torch has one generator for the whole process, from which weights and dropout are drawn: whoever draws takes it
with its own state and gives it back as it was. So trainings in two threads draw what each would draw alone, and take turns, step by step."""

import threading

import torch
from torch import Tensor

_turn = threading.Lock()


class Chance:
    """`with chance:` torch draws from this state."""

    def __init__(self, seed: int, *, device: torch.device) -> None:
        self._device, self._others = device, dict[str, Tensor]()
        with _turn:
            self._others = self._taken()
            torch.manual_seed(seed)
            self.states = self._taken()
            """By name: random.cpu and, where it computes there, random.cuda."""
            self._give(self._others)

    def __enter__(self) -> None:
        _turn.acquire()
        self._others = self._taken()
        self._give(self.states)

    def __exit__(self, *error: object) -> None:
        self.states = self._taken()
        self._give(self._others)
        _turn.release()

    def _taken(self) -> dict[str, Tensor]:
        states = {"random.cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["random.cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def _give(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["random.cpu"])
        if "random.cuda" in states:
            torch.cuda.set_rng_state(states["random.cuda"], self._device)
