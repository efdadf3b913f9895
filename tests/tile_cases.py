"""Attention by the kernels of `native/tiles.py`, in a process of its own in which Triton interprets them: there the environment says so before Triton is
imported. What goes there and comes back are cases and numbers."""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from small_models import build, random_memory, random_tokens
from transformer_xl.model.attention import kernel_attend
from transformer_xl.native import INPUTS, TiledAttention, cuda

NAMES = INPUTS[:-2]


@dataclass(frozen=True, kw_only=True)
class Case:
    lanes: int = 2
    memory: int = 20
    segment: int = 37
    heads: int = 2
    width: int = 16
    valid: tuple[int, ...] | None = None
    visible: int | None = None
    biased: bool = True
    dtype: torch.dtype = torch.float32
    precise_tables: bool = False
    """Relative keys and biases in float32, as autocast leaves them."""
    tiles: tuple[int, int] | None = (16, 16)
    """None: the sizes that a card would get."""
    dropout: float = 0.0
    unit_values: bool = False
    """Of key j the j-th unit vector, so that what a query gathers are its probabilities."""
    seed: int = 0


def leaves(case: Case) -> dict[str, Tensor]:
    """Rounded to the case's type. In the order of `NAMES`."""
    B, M, T, H, K = case.lanes, case.memory, case.segment, case.heads, case.width
    generator = torch.Generator().manual_seed(case.seed)
    shapes = ((B, T, H, K), (B, M, 2, H, K), (B, T, 2, H, K), (M + T, H, K), (H, K), (H, K))
    named = {name: torch.randn(shape, generator=generator) for name, shape in zip(NAMES, shapes, strict=True)}
    if case.unit_values:
        unit_BSHK = torch.eye(M + T, K)[None, :, None].expand(B, M + T, H, K)
        named["memory_key_value"][:, :, 1], named["key_value"][:, :, 1] = unit_BSHK[:, :M], unit_BSHK[:, M:]
    if not case.biased:
        del named["content_bias"], named["position_bias"]
    tables = {"relative", "content_bias", "position_bias"} if case.precise_tables else set()
    return {name: tensor if name in tables else tensor.to(case.dtype) for name, tensor in named.items()}


def weights(case: Case) -> Tensor:
    """What the result is multiplied by before it is added up."""
    shape = (case.lanes, case.segment, case.heads, case.width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(case.seed + 1)).to(case.dtype)


def by_the_kernels(case: Case, *, device: str = "cpu") -> dict[str, Tensor]:
    """`out` and the gradient of each leaf; of unit values, which show what was drawn, `out` alone."""
    named = {name: tensor.to(device).requires_grad_() for name, tensor in leaves(case).items()}
    lowest_B = None if case.valid is None else (case.memory - torch.tensor(case.valid)).to(device)
    torch.manual_seed(case.seed)
    with _tiles(case.tiles):
        out = kernel_attend(
            *(named.get(name) for name in NAMES),  # type: ignore[arg-type]
            lowest_B=lowest_B,
            visible_distance=case.visible,
            dropout=case.dropout,
            kind=TiledAttention,
        )
        if case.unit_values:
            return {"out": out.detach()}
        gradients = torch.autograd.grad((out * weights(case).to(device)).sum(), list(named.values()))
    return {"out": out.detach().cpu(), **{name: found.cpu() for name, found in zip(named, gradients, strict=True)}}


def learned(changes: dict[str, Any], *, by: str | None, autocast: bool = False) -> dict[str, Tensor]:
    """Losses, memory and gradients of a small model; `by` a backend in float32, or under autocast in float16, or as it chooses in float64."""
    model = build(train=True, **changes)
    memory = None
    if model.config.memory and model.config.initial_memory == "empty":
        memory = random_memory(model, lanes=3, length=6, valid=[6, 2, 0])
    tokens = random_tokens(model, lanes=3, length=8)
    if by is None:
        output = model(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=memory)
    else:
        model, memory = model.float(), None if memory is None else memory.to(dtype=torch.float32)
        lower = torch.autocast("cpu", dtype=torch.float16, enabled=autocast)
        with lower, patch("transformer_xl.model.transformer.backend_of", lambda *_, **__: by):
            output = model(tokens[:, :-1], targets_BT=tokens[:, 1:], memory=memory)
    output.loss_BT.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": output.loss_BT.detach(), "memory": output.memory.layers[-1].detach(), **gradients}


@torch.inference_mode()
def off_the_formula(dtype: torch.dtype) -> float:
    """Asked while a model only reads, where there are no gradients."""
    return cuda._off_the_formula(torch.device("cpu"), dtype)


@contextmanager
def _tiles(sizes: tuple[int, int] | None) -> Iterator[None]:
    if sizes is None:
        yield
        return
    I, J = sizes
    with patch.object(cuda, "tile_sizes", lambda *_, **__: {"I": I, "J": J}):
        yield


# --- the process


@contextmanager
def interpreter() -> Iterator[Callable[..., Any]]:
    """Calls functions of this page, or other importable ones, in the process where Triton interprets."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin) as pool:
        yield lambda function, *given, **named: _tensors(pool.submit(_call, function, given, named).result())


def _begin() -> None:
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # what nobody sees may overflow: cells of the future, and rows beyond the last


def _call(function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    found = function(*given, **named)
    return {name: tensor.numpy() for name, tensor in found.items()} if isinstance(found, dict) else found


def _tensors(found: Any) -> Any:
    if not isinstance(found, dict):
        return found
    return {name: torch.from_numpy(array) for name, array in found.items()}
