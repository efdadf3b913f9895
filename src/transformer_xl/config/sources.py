"""From where a configuration is read: a preset's name, a JSON or TOML file, dotted words. The later ones win."""

import ast
import inspect
import json
import textwrap
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from transformer_xl.config.fields import override, read
from transformer_xl.config.run import RunConfig
from transformer_xl.errors import ConfigError
from transformer_xl.files import strange_file

LARGEST_FILE = 1 << 20


def read_file(path: Path | str) -> dict[str, Any]:
    """The fields that a .json or .toml file sets; it need not set all."""
    path = Path(path)
    if strange_file([path], links=True):
        raise ConfigError(f"{path} is no plain file; write the configuration into one")
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ConfigError(
                f"{path} has {path.stat().st_size:,} bytes, too many for a configuration; at most {LARGEST_FILE:,}"
            )
        text = path.read_text(encoding="utf-8")
        value = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {path}; give a preset's name (txl presets) or a .json or .toml file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not {'TOML' if path.suffix == '.toml' else 'JSON'} ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no table of fields")
    return value


def resolve(base: RunConfig | None, *, vocabulary: int, files: list[Path], words: Mapping[str, str]) -> RunConfig:
    """`base` with the vocabulary of the data, changed by each file in turn, then by dotted words."""
    layers: list[dict[str, Any]] = [{"model": for_vocabulary(base, vocabulary)}, *map(read_file, files)]
    config = with_values(base, *layers)
    by_steps = "training.steps" in words and "training.minutes" not in words
    return override(config, {**words, "training.minutes": "0"} if by_steps else words)


def for_vocabulary(base: RunConfig | None, vocabulary: int) -> dict[str, Any]:
    """What a model is told of the data's vocabulary: its size, and where the softmax of `base` is still cut, if it was made for a larger one. What else of a
    preset depends on its cutoffs is not guessed."""
    cutoffs = () if base is None or base.model.tie_projections else base.model.cutoffs
    kept = [edge for edge in cutoffs if edge < vocabulary]
    return {"vocabulary": vocabulary, **({"cutoffs": kept} if len(kept) < len(cutoffs) else {})}


def with_values(base: RunConfig | None, *layers: dict[str, Any]) -> RunConfig:
    """`base` changed by each table of fields in turn. Who names steps and no minutes means that steps decide."""
    value = {} if base is None else asdict(base)
    for layer in layers:
        training = layer.get("training")
        if isinstance(training, dict) and "steps" in training and "minutes" not in training:
            layer = {**layer, "training": {**training, "minutes": 0.0}}
        value = _merged(value, layer)
    return read(RunConfig, value, name="")


def options(kind: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Every dotted field with its choices and its explanation, for a command's --help; once where two kinds of model share it."""
    hints, explanations = typing.get_type_hints(kind), _explanations(kind)
    for field in fields(kind):
        name = f"{prefix}{field.name}"
        groups = [group for group in (hints[field.name], *typing.get_args(hints[field.name])) if is_dataclass(group)]
        if groups:
            seen: dict[str, tuple[str, str, str]] = {}
            for group in groups:
                for option in options(group, f"{name}."):  # type: ignore[arg-type]
                    seen.setdefault(option[0], option)
            yield from seen.values()
        else:
            choices = (
                typing.get_args(hints[field.name]) if typing.get_origin(hints[field.name]) is typing.Literal else ()
            )
            if len(choices) != 1:  # what can only be one thing is no choice
                yield name, "|".join(map(str, choices)), explanations.get(field.name, "")


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _explanations(kind: type) -> dict[str, str]:
    """The sentence under each field, which Python itself does not keep."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        found |= _own_explanations(base)
    return found


def _own_explanations(kind: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        described = (
            isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        )
        if described:
            found[field.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found
