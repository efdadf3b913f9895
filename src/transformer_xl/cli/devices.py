"""What commands that read with a model share: the words of `--adapter`, and one line that says what `--device auto` has chosen; training says it by itself."""

import argparse
from typing import TYPE_CHECKING

from transformer_xl.console import say
from transformer_xl.devices import AUTO, computing_on

if TYPE_CHECKING:
    from transformer_xl.library import Loaded

ADAPTER_HELP = "add this adapter to the run's weights; it must have been trained beside them"


def say_device(arguments: argparse.Namespace, loaded: "Loaded") -> None:
    if arguments.device == AUTO:
        say(computing_on(loaded.device))
