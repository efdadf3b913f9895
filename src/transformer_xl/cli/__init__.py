"""Words typed -> functions called. One module per command, imported only when that command runs: `txl --help` never waits for torch.

A command whose name is a word of Python's (import) has a module with an underscore, and so has a dash. Each command module has `configure(parser)`, which adds its options, and `run(arguments)`, which returns the exit code.
"""

import argparse
import codecs
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from keyword import iskeyword
from typing import Any, NoReturn

from transformer_xl.errors import TransformerXLError, suggest

COMMANDS = {
    "fit": "a model of your own text, in one command and so many minutes",
    "demo": "see it work, start to end: data, training, evaluation, text",
    "prepare": "make a data store from a known corpus or your own text",
    "data": "show what a data store holds",
    "presets": "the models of the paper: sizes, lengths, results, provenance",
    "train": "train a model; run it again to go on",
    "runs": "the runs in a folder: size, steps, minutes, best figure, data, date",
    "evaluate": "how good a model is, and by which rule",
    "compare": "runs side by side: one text, one rule, and their curves",
    "recl": "how much context models make use of",
    "tune-adaptation": "how a model should learn while it reads, found on valid and kept in the run",
    "generate": "text out of a model",
    "score": "how surprising each token or line of a text or a stream is",
    "compress": "a file in fewer bytes, by a model; the same on every machine",
    "decompress": "and back",
    "serve": "a page and an HTTP API: talk to a model, watch its memory",
    "attention": "what each head of a model looks at: figures and a page",
    "import": "make a run of somebody else's checkpoint, safely",
    "export": "write a model for other software",
    "bench": "how fast, beside other implementations and the machine's limits",
    "doctor": "whether everything computes what it should on this machine and its GPU",
    "study": "the tables of the paper: trains, evaluates, writes our figures beside its own",
}

TYPED_AS = {"vocabulary_file": "vocab", "vocabulary_size": "vocab-size", "shares": "split"}
"""Arguments that are typed under another name than programs give them."""


class Parser(argparse.ArgumentParser):
    """Speaks one sentence where argparse prints its usage, and takes no abbreviations."""

    def __init__(self, **options: object) -> None:
        super().__init__(**{"allow_abbrev": False, **options})  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see: {self.prog} --help")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """argparse takes `--` for the end of options even as the value of one (--separator=--), and then has none."""
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            return self._get_value(action, "--")
        return super()._get_values(action, arg_strings)

    def parse_all(self, words: list[str]) -> argparse.Namespace:
        """Like parse_args, with the nearest known option for one that is unknown."""
        several = sum(not action.option_strings for action in self._actions) > 1
        # Of several words the first may be left out, and options may stand between them: RUN --by line FILE.
        arguments, unknown = (self.parse_known_intermixed_args if several else self.parse_known_args)(words)
        options = [word.split("=")[0] for word in unknown if word.startswith("--")]
        if options:
            known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
            if near := get_close_matches(options[0], known, n=1):
                raise UsageError(f"no option {options[0]}; did you mean {near[0]}?")
            self.error(f"no option {options[0]}")
        if unknown:
            self.error(f"{unknown[0]} is one word too many")
        return arguments


class UsageError(TransformerXLError):
    """Words on the command line that fit no command."""


class Terminated(BaseException):
    """By SIGTERM, where a command has no other use for it."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    speak_utf8()
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch then asks for huge pages: a large gradient costs a fifth
    try:
        with sigterm_unwinds():
            return dispatch(words)
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":  # torchrun gives every process the same words: one answer is enough
            print(f"txl: {error}", file=sys.stderr)
        return 2
    except TransformerXLError as error:
        sentence = in_flags(str(error))
    except BrokenPipeError:
        # The reader of our output left (`txl presets | head`): nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        sentence = f"{error.filename}: " * bool(error.filename) + str(error.strerror or error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        sentence = "there is not enough memory for this; take smaller sizes, fewer lanes or a shorter text"
    except KeyboardInterrupt:
        print("txl: stopped", file=sys.stderr)
        return 130
    except Terminated:
        if "RANK" not in os.environ:  # torchrun ends the others when one has failed, and names that one
            print("txl: stopped", file=sys.stderr)
        return 128 + signal.SIGTERM
    print(f"txl: {sentence}", file=sys.stderr)
    return 2


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, so that what is half written goes away. Training, scoring and serving have their own use for it meanwhile."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def unwind(*_: object) -> NoReturn:
        raise Terminated

    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def in_flags(sentence: str) -> str:
    """Arguments as they are typed: --data for `data=`, --memory 0 for `memory=0`."""
    flag = {name: name.replace("_", "-") for name in re.findall(r"`(\w+)=", sentence)} | TYPED_AS
    return re.sub(r"`(\w+)=([^`]*)`", lambda said: f"--{flag[said[1]]} {said[2]}".rstrip(), sentence)


def is_out_of_memory(error: Exception) -> bool:
    """The last resort, where nothing could be counted before. Torch says it with a RuntimeError in several wordings."""
    told = ("can't allocate memory", "not enough memory", "out of memory", "storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(words in str(error) for words in told)


def speak_utf8() -> None:
    """Text of a model can hold any letter, and an ASCII locale only says that nobody chose one. What cannot be printed elsewhere is escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        ascii_only = codecs.lookup(sys.stdout.encoding).name == "ascii"
        sys.stdout.reconfigure(encoding="utf-8" if ascii_only else None, errors="backslashreplace")


def dispatch(words: list[str]) -> int:
    from transformer_xl import __version__

    started_at = time.perf_counter()

    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"txl {__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        raise UsageError(f"no command {name}{suggest(name, COMMANDS)}")
    command = module_of(name)
    parser = Parser(
        prog=f"txl {name}", description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.configure(parser)
    arguments = parser.parse_all(words[1:])
    arguments.words = words[1:]  # as typed, for commands that write down how a result was made
    arguments.started_at = started_at  # for commands that promise to be done in time: loading torch takes seconds
    exit_code: int = command.run(arguments)
    return exit_code


def module_of(command: str) -> Any:
    return import_module(f"transformer_xl.cli.{command.replace('-', '_')}{'_' if iskeyword(command) else ''}")


def overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {purpose}" for name, purpose in COMMANDS.items())
    return f"""usage: txl COMMAND [options]

Transformer-XL: language models with memory.

{commands}

What reads with a model takes a run's folder; without one, the model in the box, which comes with the package.
txl COMMAND --help explains one command."""
