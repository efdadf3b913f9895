"""Reading text with a trained model, computing nothing twice."""

from pathlib import Path
from typing import Any, Literal, overload

from transformer_xl.errors import InputError
from transformer_xl.inference.engine import Engine, Sight
from transformer_xl.inference.portable import PortableReader
from transformer_xl.inference.reader import Reader
from transformer_xl.inference.recurrent import RecurrentEngine
from transformer_xl.inference.weights import WeightKind
from transformer_xl.inference.windows import WindowReader
from transformer_xl.model import AnyModel, Recurrent

__all__ = [
    "Engine",
    "PortableReader",
    "Reader",
    "RecurrentEngine",
    "Sight",
    "WindowReader",
    "make_reader",
    "restore_reader",
]


@overload
def make_reader(
    model: AnyModel, *, lanes: int = ..., memory: int | None = ..., portable: Literal[True]
) -> PortableReader: ...


@overload
def make_reader(
    model: AnyModel,
    *,
    lanes: int = ...,
    memory: int | None = ...,
    sight: Sight = ...,
    weights: WeightKind = ...,
    window: int | None = ...,
    portable: Literal[False] = ...,
) -> Reader: ...


def make_reader(
    model: AnyModel,
    *,
    lanes: int = 1,
    memory: int | None = None,
    sight: Sight = "last",
    weights: WeightKind = "exact",
    window: int | None = None,
    portable: bool = False,
) -> Reader | PortableReader:
    """The reader of this kind of model. `memory`: other than the model's own. `window`: what is shown of a text where there is no memory. `portable`: one
    that tells the next token's frequencies, in the same bits on every machine."""
    if portable:
        for name, given, usual in (("sight", sight, "last"), ("weights", weights, "exact"), ("window", window, None)):
            if given != usual:
                raise InputError(f"{name}: {given!r} is not for a portable reader; leave it out")
        return PortableReader(model, lanes=lanes, memory=memory)
    kind, how = _kind(model, memory=memory, sight=sight, weights=weights, window=window)
    reader: Reader = kind(model, lanes=lanes, **how)
    return reader


def restore_reader(
    model: AnyModel,
    path: Path | str,
    *,
    lanes: int | None = None,
    memory: int | None = None,
    weights: WeightKind = "exact",
) -> Reader:
    """As it was saved: with as many lanes, and with the model's own memory or the one told."""
    kind, how = _kind(model, memory=memory, sight="last", weights=weights, window=None)
    reader: Reader = kind.restore(model, path, lanes=lanes, **how)
    return reader


def _kind(
    model: AnyModel, *, memory: int | None, sight: Sight, weights: WeightKind, window: int | None
) -> tuple[type[Any], dict[str, Any]]:
    """The one place that turns a kind of model into a kind of reader."""
    if isinstance(model, Recurrent):
        if memory:
            raise InputError(f"memory: {memory} is for attention, and the {model.config.cell} has none; leave it out")
        if weights != "exact":
            raise InputError(f"weights: {weights!r} is for Transformer-XL; read the {model.config.cell} with 'exact'")
        return RecurrentEngine, {}
    if model.config.remembers or memory is not None:
        return Engine, {"memory": memory, "sight": sight, "weights": weights}
    if weights != "exact":
        raise InputError(f"weights: {weights!r} is for models with memory; give this one a memory, or take 'exact'")
    return WindowReader, {"window": window}
