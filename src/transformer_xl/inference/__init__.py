"""Reading text with a trained model, computing nothing twice."""

from pathlib import Path

from transformer_xl.errors import InputError
from transformer_xl.inference.engine import Engine, Sight
from transformer_xl.inference.reader import Reader
from transformer_xl.inference.recurrent import RecurrentEngine
from transformer_xl.inference.weights import WeightKind
from transformer_xl.model import AnyModel, Recurrent

__all__ = ["Engine", "Reader", "RecurrentEngine", "Sight", "make_engine", "restore_engine"]


def make_engine(
    model: AnyModel,
    *,
    lanes: int = 1,
    memory: int | None = None,
    sight: Sight = "last",
    weights: WeightKind = "exact",
) -> Reader:
    """The engine of this kind of model."""
    if isinstance(model, Recurrent):
        _check_recurrent(model, memory, weights)
        return RecurrentEngine(model, lanes=lanes)
    return Engine(model, lanes=lanes, memory=memory, sight=sight, weights=weights)


def restore_engine(
    model: AnyModel,
    path: Path | str,
    *,
    lanes: int | None = None,
    memory: int | None = None,
    weights: WeightKind = "exact",
) -> Reader:
    """As it was saved: with as many lanes, and with the model's own memory or the one told."""
    if isinstance(model, Recurrent):
        _check_recurrent(model, memory, weights)
        return RecurrentEngine.restore(model, path, lanes=lanes)
    return Engine.restore(model, path, lanes=lanes, memory=memory, weights=weights)


def _check_recurrent(model: Recurrent, memory: int | None, weights: WeightKind) -> None:
    if memory:
        raise InputError(f"memory: {memory} is for attention, and the {model.config.cell} has none; leave it out")
    if weights != "exact":
        raise InputError(f"weights: {weights!r} is for Transformer-XL; read the {model.config.cell} with 'exact'")
