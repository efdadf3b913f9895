"""Writes a file in fewer bytes, by what a model expects and what was counted in the file so far. Any machine makes the file of them again.

    txl compress notes.txt                                           (writes notes.txt.txl, by the model in the box)
    txl compress notes.txt --model runs/notes                        (by a model of your own)
    txl compress notes.txt --model runs/notes --level best           (slower, and smaller)
    tail -f server.log | txl compress - --model runs/logs > log.txl

fast reads parts of the file side by side; best reads it from one end to the other, so that each byte is expected from all before it. Nothing grows by more
than 64 bytes; a pipe, which cannot be read twice, by 16 more for every 1 MB that nothing helps with. docs/compressing.md has the format."""

import argparse
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import UnsupportedOperation
from pathlib import Path
from typing import BinaryIO, cast

from transformer_xl.cli.models import RUN_HELP
from transformer_xl.errors import InputError

ENDING = ".txl"


def configure(parser: argparse.ArgumentParser) -> None:
    add_files(parser, f"FILE{ENDING}")
    parser.add_argument("--level", choices=("fast", "best"), default="fast", help="fast, or small (fast)")


def add_files(parser: argparse.ArgumentParser, usual: str) -> None:
    parser.add_argument("file", metavar="FILE", help="- reads standard input, and writes standard output")
    parser.add_argument("-o", "--out", metavar="OUT", help=f"the file to write ({usual}); - is standard output")
    parser.add_argument("--model", metavar="RUN", help=RUN_HELP)


def run(arguments: argparse.Namespace) -> int:
    out = arguments.out or ("-" if arguments.file == "-" else unused(f"{arguments.file}{ENDING}"))
    with source_of(arguments.file, out=out) as source:
        from transformer_xl.cli.models import load_named
        from transformer_xl.compressing import coder_of
        from transformer_xl.compression import compress_stream
        from transformer_xl.console import progress

        coder = coder_of(load_named(arguments.model, device="cpu"))
        total = size_of(source)
        with sink_of(out) as sink, progress("compressing", total=total, unit="bytes") as advance:
            again = total is not None and "-" not in (arguments.file, out)
            read, written = compress_stream(source, sink, coder, level=arguments.level, advance=advance, again=again)
    if out != "-":
        share = f", {8 * written / read:.3f} bits per byte" if read else ""
        print(f"{out}: {written:,} bytes for {read:,}{share}")
    return 0


def unused(name: str) -> str:
    """A name that nobody typed replaces nothing."""
    if os.path.lexists(name):
        raise InputError(f"{name} exists; name the file to write with --out")
    return name


@contextmanager
def source_of(name: str, *, out: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
        return
    path = Path(name)
    if not path.exists() or path.is_dir():
        raise InputError(
            f"{path} {'is a folder' if path.is_dir() else 'does not exist'}; name a file, or - for standard input"
        )
    if out != "-" and Path(out).exists() and path.samefile(out):
        raise InputError(f"{out} is the file that is read; name another to write with --out")
    with path.open("rb") as source:
        yield source


@contextmanager
def sink_of(name: str) -> Iterator[BinaryIO]:
    """A file appears when all of it is there, and right."""
    if name != "-":
        from transformer_xl.files import atomic_file

        if Path(name).exists() and not Path(name).is_file():
            raise InputError(f"{name} is no plain file; name one to write, or - for standard output")
        with atomic_file(name) as file:
            yield cast(BinaryIO, file)
        return
    if sys.stdout.isatty():
        raise InputError("these bytes are not for a terminal; name a file to write with --out")
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def size_of(source: BinaryIO) -> int | None:
    """None for a pipe, or a device: they do not tell."""
    try:
        if not source.seekable() or not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            return None
    except UnsupportedOperation:  # somebody's own standard input
        return None
    here = source.tell()
    end = source.seek(0, os.SEEK_END)
    source.seek(here)
    return end - here
