"""What commands that read with a model share: `--device`, the words of `--adapter`, and one line that says what `--device auto` has chosen; training says
it by itself."""

import argparse
from typing import TYPE_CHECKING

from transformer_xl.console import say
from transformer_xl.devices import AUTO, DEVICES_HELP, PRECISION_HELP, PRECISIONS, Precision, computing_on

if TYPE_CHECKING:
    from transformer_xl.library import Loaded

ADAPTER_HELP = "add this adapter to the run's weights; it must have been trained beside them"


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=AUTO, help=DEVICES_HELP)


def add_precision(parser: argparse.ArgumentParser, *, default: Precision) -> None:
    parser.add_argument("--precision", choices=PRECISIONS, default=default, help=f"{PRECISION_HELP} ({default})")


def say_device(arguments: argparse.Namespace, loaded: "Loaded") -> None:
    """What was chosen, where nobody named it."""
    if arguments.device == AUTO or loaded.model.reads_in is not None:
        say(computing_on(loaded.device, half=loaded.model.reads_in))
