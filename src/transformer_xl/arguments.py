"""Whether a program's arguments are what the public calls take: a wrong kind is one sentence at the call, not a puzzle ten calls below it. Knows no torch."""

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from transformer_xl.errors import InputError, suggest

P = ParamSpec("P")
R = TypeVar("R")
NAMED = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bytes: "bytes",
    bool: "True or False",
    Path: "a path",
    type(None): "None",
}
LONGEST_SHOWN = 60


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Compares each argument with its annotation before the call. Annotations that are written as text, for what is imported late, are believed."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*positional: P.args, **named: P.kwargs) -> R:
        try:
            bound = signature.bind(*positional, **named).arguments
        except TypeError:  # a name that it does not have: Python says it best
            return function(*positional, **named)
        for name, value in bound.items():
            wanted = signature.parameters[name].annotation
            if name != "self" and not fits(value, wanted):
                raise InputError(f"`{name}={_shown(value)}` must be {in_words(wanted)}{_nearest(value, wanted)}")
        return function(*positional, **named)

    return call


def fits(value: object, wanted: Any) -> bool:
    origin, inside = get_origin(wanted), get_args(wanted)
    if (
        wanted in (inspect.Parameter.empty, Any)
        or isinstance(wanted, str | TypeVar)
        or getattr(wanted, "_is_protocol", False)
    ):
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inside)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in inside)
    if origin in (Sequence, list, tuple):
        several = isinstance(value, Iterable) and hasattr(value, "__len__") and not isinstance(value, str | bytes)
        return several and all(fits(one, inside[0]) for one in value)  # type: ignore[attr-defined]
    if wanted in (int, float):
        return isinstance(value, Integral if wanted is int else Real) and not isinstance(value, bool)
    if origin in (Mapping, Iterable):
        return isinstance(value, origin)
    if origin is not None:
        return callable(value)
    return (wanted is None and value is None) or (isinstance(wanted, type) and isinstance(value, wanted))


def in_words(wanted: Any) -> str:
    origin, inside = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(in_words(one) for one in inside if one is not type(None)))
    if origin is Literal:
        return f"one of {', '.join(map(str, inside))}"
    if origin in (Sequence, list, tuple):
        return f"a list, each of it {in_words(inside[0])}"
    if origin is Mapping:
        return "a dictionary"
    if origin is not None:
        return "a function" if origin is not Iterable else "something to iterate over"
    return NAMED.get(wanted, f"a {getattr(wanted, '__name__', wanted)}")


def _shown(value: object) -> str:
    text = repr(value)
    return (text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "...").replace("`", "'")


def _nearest(value: object, wanted: Any) -> str:
    known = [word for one in (wanted, *get_args(wanted)) if get_origin(one) is Literal for word in get_args(one)]
    return suggest(value, known) if isinstance(value, str) and known else ""
