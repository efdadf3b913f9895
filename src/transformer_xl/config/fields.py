"""Values from outside (JSON, TOML, the command line) -> frozen dataclasses, strictly: unknown names, wrong types and missing
fields are refused by their dotted name. Knows no particular configuration.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from transformer_xl.errors import ConfigError, shown, suggest

T = TypeVar("T")
LARGEST_SIZE = 2**31 - 1
LARGEST_SEED = 2**63 - 1
MOST_PARTS = 4096
"""Layers, classifiers or clusters: none was ever built of as many, and a file can ask for a million."""


def read(kind: type[T], value: object, *, name: str) -> T:
    """`value` as an instance of the dataclass `kind`; `name` is the dotted place it stands in, for messages."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: expected a table of fields, found {shown(value)}")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    arguments = {}
    for key, item in value.items():
        if key not in fields:
            raise ConfigError(
                f"no field {_join(name, key)}{suggest(_join(name, key), (_join(name, known) for known in fields))}"
            )
        arguments[key] = convert(hints[key], item, name=_join(name, key))
    for key, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and key not in arguments:
            raise ConfigError(f"{_join(name, key)} is missing; it has no default")
    return kind(**arguments)


def convert(hint: Any, value: object, *, name: str) -> Any:
    """`value` as the annotated type `hint`, or a ConfigError naming the field."""
    if dataclasses.is_dataclass(hint):
        return read(typing.cast(type, hint), value, name=name)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(f"{name}: {shown(value)} is unknown{suggest(_word(value), map(str, arguments))}")
        return value
    if origin in (types.UnionType, typing.Union):
        kinds = [kind for kind in arguments if dataclasses.is_dataclass(kind)]
        if kinds:  # several kinds of table: the one that knows most of these fields
            return convert(min(kinds, key=lambda kind: _unknown(kind, value)), value, name=name)
        return None if value is None else convert(next(a for a in arguments if a is not type(None)), value, name=name)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: expected a table of fields, found {shown(value)}")
        return {key: convert(arguments[1], item, name=_join(name, key)) for key, item in value.items()}
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name}: expected a list, found {shown(value)}")
        return tuple(convert(arguments[0], item, name=f"{name}[{i}]") for i, item in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name}: {shown(value)} is larger than any number can be") from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{name}: expected {_article(hint.__name__)}, found {shown(value)}")
    return value


def parse(hint: Any, text: str, *, name: str) -> Any:
    """A word of the command line as the annotated type `hint`: `none`, `true`, `1e-4`, `20000,40000`, or a plain word."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = next(a for a in arguments if a is not type(None))
        return None if text.lower() == "none" else parse(inner, text, name=name)
    if origin is tuple:
        return tuple(parse(arguments[0], item, name=name) for item in text.split(",") if item)
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{name}: expected true or false, found {text!r}")
        return text.lower() == "true"
    if hint in (int, float):
        try:
            return hint(text.replace("_", ""))
        except ValueError:
            raise ConfigError(f"{name}: expected {_article(hint.__name__)}, found {text!r}") from None
    return convert(hint, text, name=name)


def override(config: T, changes: Mapping[str, str], *, name: str = "") -> T:
    """A copy of `config` with dotted fields replaced by words: `{"model.memory": "640"}`."""
    of_class = typing.get_type_hints(type(config))
    hints = {field.name: of_class[field.name] for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    nested: dict[str, dict[str, str]] = {}
    values: dict[str, Any] = {}
    for dotted, text in changes.items():
        head, _, rest = dotted.partition(".")
        where = _join(name, head)
        if head not in hints:
            raise ConfigError(f"no field {where}{suggest(where, (_join(name, known) for known in hints))}")
        inner = getattr(config, head)
        if rest:
            if not dataclasses.is_dataclass(inner):
                raise ConfigError(f"no field {where}.{rest}; {where} is a single value")
            nested.setdefault(head, {})[rest] = text
        elif dataclasses.is_dataclass(inner):
            raise ConfigError(
                f"{where} is a group of fields; set one of them: {where}.{dataclasses.fields(inner)[0].name}"
            )
        else:
            values[head] = parse(hints[head], text, name=where)
    for head, words in nested.items():
        values[head] = override(getattr(config, head), words, name=_join(name, head))
    return dataclasses.replace(config, **values)  # type: ignore[type-var]


def no_giant(config: object, section: str, *, but: tuple[str, ...] = ()) -> None:
    """Refuses whole numbers that are no size of anything, before somebody multiplies them."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if type(value) is int and abs(value) > LARGEST_SIZE and field.name not in but:
            raise ConfigError(
                f"{section}.{field.name}: {shown(value)} is too large; it must be at most {LARGEST_SIZE:,}"
            )


def at_most(config: object, section: str, most: int, *names: str) -> None:
    """For counts of things that are built one after another, each of which costs time and memory whatever its size."""
    for name in names:
        if getattr(config, name) > most:
            raise ConfigError(
                f"{section}.{name}: {shown(getattr(config, name))} is too large; it must be at most {most:,}"
            )


def positive(config: object, section: str, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{section}.{name}: {shown(getattr(config, name))} is too small; it must be at least 1")


def not_negative(config: object, section: str, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= 0:  # written so that NaN fails too
            raise ConfigError(f"{section}.{name}: {shown(getattr(config, name))} is negative; it must be 0 or more")
        if getattr(config, name) == math.inf:
            raise ConfigError(f"{section}.{name}: {getattr(config, name)} is no number to reckon with; make it smaller")


def fraction(config: object, section: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0.0 <= value < 1.0:
            raise ConfigError(f"{section}.{name}: {shown(value)} is not a rate; it must be at least 0 and below 1")


def literal(config: Any, section: str, *names: str) -> None:
    """Each is among the words of its own annotation."""
    for name in names:
        one_of(config, section, name, typing.get_args(config.__dataclass_fields__[name].type))


def one_of(config: object, section: str, name: str, known: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in known:
        raise ConfigError(f"{section}.{name}: {shown(value)} is unknown{suggest(_word(value), known)}")


def _unknown(kind: Any, value: object) -> int:
    known = {field.name for field in dataclasses.fields(kind)}
    return sum(key not in known for key in value) if isinstance(value, Mapping) else 0


def _word(value: object) -> str:
    """What was meant to be one of a few words."""
    return value if isinstance(value, str) else shown(value)


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _article(word: str) -> str:
    return {"int": "a whole number", "float": "a number", "str": "a word", "bool": "true or false"}.get(word, word)
