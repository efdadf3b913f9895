"""The options of commands that can learn while they read."""

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING, get_args

from transformer_xl.config import AdaptationConfig
from transformer_xl.config.adaptation import Adapt
from transformer_xl.config.fields import override
from transformer_xl.errors import ConfigError

if TYPE_CHECKING:
    from transformer_xl.library import Loaded

PREFIX = "adaptation."
WAYS = get_args(Adapt)


def add_adapt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapt",
        choices=WAYS,
        help="learn while reading, each token after it was scored: weights that move, a cache of what was seen, or both, as txl tune-adaptation found",
    )
    add_fields(parser, *(field.name for field in fields(AdaptationConfig)))


def add_fields(parser: argparse.ArgumentParser, *names: str) -> None:
    group = parser.add_argument_group("how it learns, where not as tuned; docs/reading.md explains them")
    for name in names:
        group.add_argument(f"--{PREFIX}{name}", metavar="VALUE")


def overridden(how: AdaptationConfig, arguments: argparse.Namespace) -> AdaptationConfig:
    return override(how, _given(arguments), name="adaptation")


def chosen(arguments: argparse.Namespace, loaded: "Loaded") -> AdaptationConfig | None:
    """None where nothing is to be learned. What is given by hand stands; where that does not say it all, the run must have been tuned."""
    given = _given(arguments)
    if arguments.adapt is None:
        if given:
            raise ConfigError(
                f"--{PREFIX}{next(iter(given))} says how to learn; say with --adapt {'|'.join(WAYS)} that it shall"
            )
        return None
    needed = {"gradient": {"rate"}, "cache": {"cache_lambda"}, "both": {"rate", "cache_lambda"}}[arguments.adapt]
    how = overridden(AdaptationConfig() if needed <= given.keys() else loaded.adaptation(arguments.adapt), arguments)
    return {"gradient": how.without("cache"), "cache": how.without("gradient"), "both": how}[arguments.adapt]


def _given(arguments: argparse.Namespace) -> dict[str, str]:
    words = {name.removeprefix(PREFIX): word for name, word in vars(arguments).items() if name.startswith(PREFIX)}
    return {name: word for name, word in words.items() if word is not None}
