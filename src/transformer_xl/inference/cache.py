"""Keys and values of the last M positions of each lane, kept for every layer. A value like memory: selected, joined, moved, saved, per lane.

positions   . . . m m m m m | 0 1 2 . . .        one buffer per layer; `end` moves right as tokens come,
                  ^ end-M   ^ end      ^ room    and the last M are moved to the front when room runs out
"""

from collections.abc import Mapping, Sequence
from copy import copy
from math import prod

import torch
from torch import Tensor

from transformer_xl.config import ModelConfig, RecurrentConfig
from transformer_xl.devices import to_device
from transformer_xl.errors import InputError, shown
from transformer_xl.inference.reader import chunk_of
from transformer_xl.model.memory import check_fits
from transformer_xl.tensor_files import Kind

ROOM = 512
"""Positions of a buffer beyond its memory, or half the memory if that is more: so many tokens pass between two moves."""


def room(memory: int) -> int:
    return memory + max(ROOM, memory // 2)


def kept_bytes(config: ModelConfig | RecurrentConfig, *, lanes: int) -> int:
    """What a reader keeps of its texts takes in float32."""
    return lanes * (config.kept_of_a_state + config.kept_of_a_position * room(config.memory)) * 4


def table_numbers(config: ModelConfig, *, distances: int) -> int:
    """What the relative keys of so many distances take while they are laid out: sines, angles, and each layer's keys twice."""
    return distances * (4 * config.d_model + 2 * config.n_layer * config.n_head * config.d_head)


class Cache:
    def __init__(self, config: ModelConfig, *, lanes: int, memory: int, like: Tensor) -> None:
        shape = (lanes, config.n_head, room(memory), config.d_head)
        numbers = 2 * config.n_layer * prod(shape) + table_numbers(config, distances=memory + chunk_of(lanes))
        check_fits(numbers, like=like, what=f"a memory of {shown(memory)} positions for {shown(lanes)} lanes")
        self.memory = self.end = memory
        self.recent_BP = torch.full((lanes, config.recent), -1, dtype=torch.int64, device=like.device)
        """The last tokens of each lane, -1 where there are none: for models that embed runs of tokens."""
        self.valid_B = torch.zeros(lanes, dtype=torch.int64)
        """How many kept positions of each lane are real."""
        self.keys = [like.new_zeros(shape) for _ in range(config.n_layer)]
        self.values = [like.new_zeros(shape) for _ in range(config.n_layer)]
        """[B, H, room, K] each. Both lists are new ones whenever a buffer lies elsewhere than before."""
        self._spare: list[Tensor] = []
        """The buffers of keys, then of values, with lanes to spare: `keys` and `values` are their first lanes. Empty where there are none to spare."""

    # --- tokens come

    def make_room(self, tokens: int) -> None:
        """Moves the memory to the front of its buffer when the tokens would not fit behind it; longer ones get a longer buffer."""
        B, H, W, K = self.keys[0].shape
        if self.end + tokens <= W:
            return
        longer = self.memory + tokens > W
        buffers = []
        for buffer in (*self.keys, *self.values):
            kept = self._remembered(buffer).clone()
            buffers.append(buffer.new_zeros(B, H, room(self.memory) + tokens, K) if longer else buffer)
            buffers[-1][:, :, : self.memory] = kept
        self.end = self.memory
        if longer:
            self._spare = []
            self._use(buffers, lanes=B)

    def keep(self, layer: int, key_BHTK: Tensor, value_BHTK: Tensor, *, seen: int) -> tuple[Tensor, Tensor]:
        """Of tokens that come next, for which there is room; all keys and values from `seen` positions before them on."""
        end = self.end + key_BHTK.shape[2]
        for buffer, new_BHTK in ((self.keys[layer], key_BHTK), (self.values[layer], value_BHTK)):
            buffer[:, :, self.end : end] = new_BHTK
        begin = self.end - seen
        return self.keys[layer][:, :, begin:end], self.values[layer][:, :, begin:end]

    def advance(self, tokens_BT: Tensor) -> None:
        """They were kept in every layer."""
        T = tokens_BT.shape[1]
        self.end += T
        self.valid_B = (self.valid_B + T).clamp_(max=self.memory)
        if self.recent_BP.shape[1]:
            self.recent_BP = torch.cat([self.recent_BP, tokens_BT.to(self.recent_BP)], dim=1)[:, T:]

    # --- lanes come and go

    def reset(self, lanes: list[int], *, start: Sequence[Tensor] = ()) -> None:
        """`start`: what each layer remembers at every position before the first token, [2, H, K]; nothing, where it is empty."""
        self.valid_B[lanes] = self.memory if start else 0
        there = self._there(lanes)
        self.recent_BP[there] = -1
        for number, kept_2HK in enumerate(start):
            for buffer, kept_HK in zip((self.keys[number], self.values[number]), kept_2HK, strict=True):
                buffer[there, :, self.end - self.memory : self.end] = kept_HK[:, None]

    def select(self, lanes: list[int]) -> "Cache":
        other = copy(self)
        other._spare = []
        there = self._there(lanes)
        other._use([buffer[there] for buffer in (*self.keys, *self.values)], lanes=len(lanes))
        other.valid_B, other.recent_BP = self.valid_B[lanes], self.recent_BP[there]
        return other

    def grown(self, others: Sequence["Cache"]) -> "Cache":
        """In place: there are lanes to spare, and only when they run out do its own lanes move, into buffers twice as large."""
        first, lanes = len(self.valid_B), len(self.valid_B) + sum(len(other.valid_B) for other in others)
        if any(other.memory != self.memory for other in others):
            raise InputError("engines of several memories cannot be joined; select or fork them from one")
        kept, buffers = slice(self.end - self.memory, self.end), [*self.keys, *self.values]
        if not self._spare or len(self._spare[0]) < lanes:
            self._spare = [buffer.new_zeros(max(lanes, 2 * first), *buffer.shape[1:]) for buffer in buffers]
            for spare, buffer in zip(self._spare, buffers, strict=True):
                spare[:first, :, kept] = self._remembered(buffer)
        for other in others:
            taken = slice(first, first + len(other.valid_B))
            for spare, buffer in zip(self._spare, [*other.keys, *other.values], strict=True):
                spare[taken, :, kept] = other._remembered(buffer)
            first = taken.stop
        self.valid_B = torch.cat([self.valid_B, *(other.valid_B for other in others)])
        self.recent_BP = torch.cat([self.recent_BP, *(other.recent_BP for other in others)])
        self._use(self._spare, lanes=lanes)
        return self

    def reordered(self, order: list[int]) -> "Cache":
        """In place, with fewer lanes: each moves to a place of its own or of one that left."""
        if not self._spare:
            self._spare = [*self.keys, *self.values]
        for place, lane in enumerate(order):
            if lane != place:
                kept = slice(self.end - int(self.valid_B[lane]), self.end)
                for buffer in self._spare:
                    buffer[place, :, kept] = buffer[lane, :, kept]
        self.valid_B, self.recent_BP = self.valid_B[order], self.recent_BP[self._there(order)]
        self._use(self._spare, lanes=len(order))
        return self

    # --- at rest

    def tensors(self) -> dict[str, Tensor]:
        kept = {
            f"{name}.{number}": self._remembered(buffer).contiguous()
            for name, buffers in (("keys", self.keys), ("values", self.values))
            for number, buffer in enumerate(buffers)
        }
        return {
            **kept,
            "valid": self.valid_B,
            **({"recent": self.recent_BP.contiguous()} if self.recent_BP.shape[1] else {}),
        }

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """What `tensors` gave, once it is known to be that."""
        for name, buffers in (("keys", self.keys), ("values", self.values)):
            for number, buffer in enumerate(buffers):
                self._remembered(buffer).copy_(tensors[f"{name}.{number}"])
        self.valid_B = tensors["valid"]
        self.recent_BP = to_device(tensors.get("recent", self.recent_BP), self.recent_BP.device)

    # --- inside

    def _there(self, lanes: list[int]) -> Tensor:
        """Lanes as an index, where the keys are."""
        return to_device(torch.tensor(lanes, dtype=torch.int64), self.recent_BP.device)

    def _remembered(self, buffer: Tensor) -> Tensor:
        return buffer[:, :, self.end - self.memory : self.end]

    def _use(self, buffers: list[Tensor], *, lanes: int) -> None:
        half = len(buffers) // 2
        self.keys = [buffer[:lanes] for buffer in buffers[:half]]
        self.values = [buffer[:lanes] for buffer in buffers[half:]]


def cache_kinds(config: ModelConfig, *, lanes: int, memory: int, dtype: torch.dtype) -> dict[str, Kind]:
    """What `Cache.tensors` gives."""
    kept = Kind(dtype, (lanes, config.n_head, memory, config.d_head))
    names = [f"{part}.{number}" for part in ("keys", "values") for number in range(config.n_layer)]
    recent = {"recent": Kind(torch.int64, (lanes, config.recent))} if config.recent else {}
    return {**dict.fromkeys(names, kept), "valid": Kind(torch.int64, (lanes,)), **recent}
