"""What commands that read with a model share: `--device`, the words of `--adapter`, and one line that says what `--device auto` has chosen; training says
it by itself."""

import argparse
from typing import TYPE_CHECKING

from transformer_xl.console import say
from transformer_xl.devices import AUTO, DEVICES_HELP, computing_on

if TYPE_CHECKING:
    from transformer_xl.library import Loaded

ADAPTER_HELP = "add this adapter to the run's weights; it must have been trained beside them"


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=AUTO, help=DEVICES_HELP)


def say_device(arguments: argparse.Namespace, loaded: "Loaded") -> None:
    if arguments.device == AUTO:
        say(computing_on(loaded.device))
